"""Policies are written in one canonical way, and mistakes name what to write instead."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbench
from kvbench import registry
from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import Policy
from kvbench.spelling import part, policy

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "window": st.integers(1, 512),
    "kernel": st.integers(0, 20).map(lambda i: 2 * i + 1),
    "pool": st.sampled_from(["max", "avg"]),
    "group": st.sampled_from(["mean", "max", "sum"]),
    "sinks": st.integers(0, 64),
    "recent": st.floats(0, 1),
    "observe": st.one_of(st.none(), st.integers(1, 512)),
    "safeguard": st.floats(0, 1),
    "safeguard_mode": st.sampled_from(["reserve", "mix"]),
    "first_stage": st.floats(0, 1),
    "eps": st.floats(0, 1e6),
    "norm": st.sampled_from(["l1", "l2"]),
    "variant": st.sampled_from(["paper", "release"]),
    "normalise": st.sampled_from(["none", "layer"]),
    "buffer": st.integers(0, 4096),
    "bits": st.sampled_from([None, 2, 4, 8]),
    "key_channels": st.floats(0, 1, exclude_min=True),
}
SCORES = ["window", "mass", "knorm", "keydiff", "recency", "random", "obcache", "roco"]
ALLOCATORS = ["uniform", "head_adaptive", "global", "pyramid", "retrieval"]
SELECTORS = ["topk", "two_stage", "mass", "important_recent"]
NAMES = [n for n in registry.names("kvbench.policies") if policy(n).evicts]


def parameters(p: Policy) -> set[str]:
    parts = (p.score, p.allocate, p.select, p.merge)
    return {"buffer", "bits", "key_channels"}.union(*(x.parameters() for x in parts if x is not None))


@st.composite
def spelled(draw: st.DrawFn) -> str:
    fields = [draw(st.sampled_from(NAMES))]
    for key, options in (("score", SCORES), ("allocate", ALLOCATORS), ("select", SELECTORS)):
        if draw(st.booleans()):
            fields.append(f"{key}={draw(st.sampled_from(options))}")
    known = sorted(parameters(policy(":".join(fields))) & set(VALUES))
    for key in draw(st.lists(st.sampled_from(known), unique=True, max_size=4)):
        value = draw(VALUES[key])
        field = f"{key}={'none' if value is None else value}"
        try:
            policy(":".join([*fields, field]))
        except UserError:  # what the key means to another part
            continue
        fields.append(field)
    return ":".join([fields[0], *draw(st.permutations(fields[1:]))])


@given(spelled())
def test_the_canonical_form_names_the_same_policy(spec: str) -> None:
    p = policy(spec)
    assert policy(str(p)) == p
    assert str(policy(str(p))) == str(p)
    assert policy(p) == p


@pytest.mark.parametrize(
    ("spec", "canonical"),
    [
        ("snapkv", "snapkv"),
        (" snapkv:window=32 ", "snapkv"),
        ("snapkv:window=64", "snapkv:window=64"),
        ("snapkv:pool=avg:kernel=5:window=064", "snapkv:kernel=5:pool=avg:window=64"),
        ("critical_adakv", "criticalkv"),
        (
            "obcache:select.variant=release:select=two_stage",
            "obcache:select=two_stage:select.variant=release",
        ),
        ("d2o:variant=release", "d2o:variant=release"),
        ("d2o:merge.variant=release", "d2o:merge.variant=release"),
        ("h2o:score.recent=0.3", "h2o:recent=0.3"),
        ("critical_adakv:safeguard=0.20", "criticalkv"),
        ("criticalkv:safeguard=.3", "criticalkv:safeguard=0.3"),
        ("snapkv:allocate=uniform:merge=none", "snapkv"),
        (
            "snapkv:window=64:allocate=head_adaptive:select=two_stage",
            "snapkv:allocate=head_adaptive:select=two_stage:window=64",
        ),
        ("h2o:observe=none:recent=0", "h2o:recent=0.0"),
        ("knorm:buffer=0", "knorm:buffer=0"),
        ("full:residual=64:bits=2", "full:bits=2:residual=64"),
        ("full:residual=64:key_channels=.6", "full:key_channels=0.6:residual=64"),
        ("full:key_channels=1", "full"),
        ("full:quantizer=kivi:bits=2", "full:bits=2"),
        ("full:quantizer=hqq:bits=2", "full:bits=2:quantizer=hqq"),
        ("snapkv:window=8:group_size=32:bits=4", "snapkv:bits=4:window=8"),
        ("full", "full"),
    ],
)
def test_canonical_spelling(spec: str, canonical: str) -> None:
    assert str(policy(spec)) == canonical


def test_parts_are_exchanged_as_the_presets_are_made() -> None:
    mixed = policy("snapkv:allocate=head_adaptive:select=two_stage")
    preset = policy("criticalkv")
    assert (mixed.score, mixed.allocate, mixed.select) == (
        preset.score,
        preset.allocate,
        preset.select,
    )
    plain = policy("criticalkv:allocate=uniform:select=topk")
    assert (plain.allocate, plain.select) == (Uniform(), TopK())


def test_a_parameter_reaches_every_part_that_has_it() -> None:
    p = policy("criticalkv:safeguard=0.4")
    assert p.allocate.parameters()["safeguard"] == p.select.parameters()["safeguard"] == 0.4


def test_keywords_win_over_the_spelling_and_are_typed() -> None:
    p = kvbench.policy("snapkv:window=64", window=16, select="two_stage")
    assert str(p) == "snapkv:select=two_stage:window=16"
    assert kvbench.policy(p, window=32, select=TopK()) == kvbench.policy("snapkv")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("snapvk", "snapkv"),
        ("criticlkv", "criticalkv"),
        ("snapkv:windw=3", "did you mean window"),
        ("snapkv:sinks=3", "has no parameter 'sinks'"),
        ("snapkv:window=x", "whole number"),
        ("snapkv:window=1.5", "whole number"),
        ("snapkv:window", "not key=value"),
        ("snapkv:window=", "not key=value"),
        ("snapkv:window=1:window=2", "given twice"),
        ("snapkv:window=0", "1 or more"),
        ("snapkv:kernel=4", "odd"),
        ("snapkv:kernel=-1", "odd"),
        ("snapkv:pool=min", "max, avg"),
        ("snapkv:group=median", "mean, max, sum"),
        ("obcache:select=two_stage:variant=release", "score.variant= or select.variant="),
        ("snapkv:select.window=3", "has no parameter 'select.window'"),
        ("snapkv:buffer=-1", "0 or more"),
        ("full:bits=3", "choose from 2, 4, 8"),
        ("full:bits=4:residual=-1", "residual 0 or more"),
        ("full:residual=8", "add bits=4"),
        ("full:group_size=8:key_channels=0.6", "group_size .* add bits=4"),
        ("full:quantizer=hqq", "add bits=4"),
        ("full:bits=8:quantizer=quanto", "quanto does not support groups of 8-bit codes"),
        ("full:bits=4:quantizer=awq", "choose from kivi, hqq, quanto"),
        ("quest:dense_layers=-1", "use 0 or more layers"),
        ("quest:key_channels=0.6", "quest rates blocks with complete keys"),
        ("full:key_channels=0", "fraction of the channels"),
        ("full:key_channels=1.5", "fraction of the channels"),
        ("full:key_channels=nan", "fraction of the channels"),
        ("full:key_channels=most", "a number"),
        ("full:buffer=8", "buffer= does not apply"),
        ("snapkv:allocate=head_adaptiv", "did you mean head_adaptive"),
        ("snapkv:select=top_k", "topk"),
        ("snapkv:score=windows", "did you mean window"),
        ("adakv:safeguard=1.2", "use a number from 0 to 1"),
        ("adakv:safeguard=nan", "use a number from 0 to 1"),
        ("adakv:safeguard_mode=both", "reserve, mix"),
        ("criticalkv:first_stage=-0.1", "use a number from 0 to 1"),
        ("criticalkv:eps=-1", "0 or more"),
        ("criticalkv:eps=inf", "0 or more"),
        ("criticalkv:norm=l3", "l1, l2"),
        ("criticalkv:variant=papers", "paper, release"),
        ("h2o:recent=2", "use a number from 0 to 1"),
        ("h2o:observe=0", "1 or more queries, or none"),
        ("streaming_llm:sinks=-1", "0 or more"),
        ("knorm:allocate=global:normalise=head", "none, layer"),
        ("full:score=knorm", "full evicts nothing"),
        ("./nowhere.py:Mine", "cannot read"),
        ("./nowhere.py", "name an object in the file"),
        ("./nowhere.md:Nope", "is not a .py file"),
        ("", "unknown policy"),
    ],
)
def test_mistakes_are_one_line_that_says_what_is_right(spec: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        policy(spec)
    assert "\n" not in str(caught.value)


def test_every_registered_policy_and_part_has_what_a_listing_shows() -> None:
    for name in registry.names("kvbench.policies"):
        p = policy(name)
        assert p.summary
        assert p.paper or p.is_full
        assert len(p.summary) <= 100
    for name in registry.names("kvbench.parts"):
        kind, _, key = name.partition(".")
        assert part(kind, key).name == key
