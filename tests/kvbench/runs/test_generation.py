"""What flags and tasks say about answers: sampling, repeats, limits, thinking, truncation."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from kvbench.decoding import THOUGHT, Sampling, from_yaml, scored_text
from kvbench.errors import UserError
from kvbench.harness.protocol import Continuation, Request
from kvbench.runs.generation import GenerationFlags, Truncation
from kvbench.runs.grid import Grid

WARM = Sampling(0.6, 0.95, 20)


def request(**changes: Any) -> Request:
    usual: dict[str, Any] = {
        "task": "t",
        "sample_id": "0",
        "doc_id": 0,
        "question_id": 0,
        "context_id": "c",
        "context": "a",
        "question": "b",
        "until": (),
        "max_new_tokens": 8,
        "target": ("x",),
    }
    return Request(**{**usual, **changes})


def applied(settings: GenerationFlags, *requests: Request) -> tuple[list[Request], list[str]]:
    said: list[str] = []
    return settings.applied(requests, said.append), said


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"do_sample": False, "temperature": 0.7},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 0.0},
        {"do_sample": False, "until": ["\n"], "max_gen_toks": 9},
    ],
)
def test_a_yaml_samples_where_lm_eval_would(kwargs: dict[str, Any]) -> None:
    theirs = dict(normalize_gen_kwargs(kwargs))
    ours = from_yaml(kwargs, "t")
    assert (ours is not None) == theirs["do_sample"]
    if ours is not None:
        assert ours.temperature == theirs["temperature"]
        assert (ours.top_p, ours.top_k) == (kwargs.get("top_p", 1.0), kwargs.get("top_k", 0))


def test_a_yaml_that_is_out_of_range_names_its_task() -> None:
    assert from_yaml({"do_sample": True}, "t") == Sampling(1.0, 1.0, 0)
    for wrong in ({"temperature": -1}, {"do_sample": True, "top_p": 1.5}, {"temperature": "hot"}):
        with pytest.raises(UserError, match=r"^leaf: generation_kwargs in its YAML: "):
            from_yaml(wrong, "leaf")


def test_flags_go_before_what_a_task_says_and_leave_the_rest() -> None:
    (made,), _ = applied(GenerationFlags(temperature=0.3), request(sampling=WARM, repeats=4))
    assert made.sampling == Sampling(0.3, 0.95, 20)
    assert (made.repeats, made.max_new_tokens) == (4, 8)
    (made,), _ = applied(GenerationFlags(top_k=5, repeats=2, max_new_tokens=99), request(sampling=WARM))
    assert made.sampling == Sampling(0.6, 0.95, 5)
    assert (made.repeats, made.max_new_tokens) == (2, 99)
    (made,), said = applied(GenerationFlags(temperature=0.5), request())
    assert (made.sampling, made.repeats, said) == (Sampling(0.5), 1, [])
    assert applied(GenerationFlags(), request(sampling=WARM))[0] == [request(sampling=WARM)]


@pytest.mark.parametrize("settings", [GenerationFlags(temperature=0), GenerationFlags()])
def test_greedy_repeats_are_made_once_and_that_is_said_once(settings: GenerationFlags) -> None:
    own = WARM if settings.temperature == 0 else None
    made, said = applied(settings, request(sampling=own, repeats=4), request(repeats=4))
    assert all(r.repeats == 1 and r.sampling is None for r in made)
    assert said == [
        "t is answered greedily, so its 4 repeats would be the same; only one is run "
        "(use --temperature 0.6 to sample answers)"
    ]


def test_given_text_is_not_drawn_and_has_no_limit_of_ours() -> None:
    own = request(given="text")
    settings = GenerationFlags(temperature=0.5, repeats=4, max_new_tokens=2)
    assert applied(settings, own) == ([own], [])
    assert settings.record(own, thinks=True) == ""


@pytest.mark.parametrize("measured", [{"continuations": (Continuation("?", "a"),)}, {"rolling": True}])
def test_measured_texts_are_not_drawn_and_have_no_limit_of_ours(measured: dict[str, Any]) -> None:
    own = request(**measured)
    settings = GenerationFlags(temperature=0.5, repeats=4, max_new_tokens=2, truncate="middle")
    assert applied(settings, own) == ([own], [])
    assert settings.record(own, thinks=True) == '{"truncate": "middle"}'


def test_what_would_do_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="t is answered greedily; --top-p and --top-k need"):
        applied(GenerationFlags(top_p=0.9), request())
    with pytest.raises(UserError, match="temperature 0 is greedy; leave out top_p and top_k"):
        Grid.from_dict({"policy": "snapkv", "task": "vt", "temperature": 0, "top_p": 0.9})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -0.1, "temperature must be a number from 0"),
        ("temperature", "nan", "temperature must be a number from 0"),
        ("temperature", "warm", "temperature must be a number from 0"),
        ("temperature", True, "temperature must be a number from 0"),
        ("top_p", 0, "top_p must be a number above 0 and at most 1, not 0"),
        ("top_p", 1.01, "top_p must be a number above 0 and at most 1"),
        ("top_k", 0, "top_k must be an integer from 1"),
        ("repeats", 0, "repeats must be an integer from 1"),
        ("max_new_tokens", "4.5", "max_new_tokens must be an integer from 1"),
        ("thinking", "yes", "thinking must be true or false"),
        ("truncate", "left", "unknown truncation 'left'; use middle"),
        ("truncate", "middle:0", "unknown truncation 'middle:0'; use middle"),
        ("truncate", "middle:x", "unknown truncation 'middle:x'; use middle"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        Grid.from_dict({"policy": "snapkv", "task": "vt", name: value})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_grid_is_named_after_its_settings_but_not_after_its_repeats() -> None:
    base = {"policy": "snapkv", "task": "vt"}
    digests = {
        Grid.from_dict({**base, **more}).digest
        for more in (
            {},
            {"temperature": 0.6},
            {"temperature": 0},
            {"temperature": 0.6, "top_p": 0.9},
            {"top_k": 3},
            {"max_new_tokens": 9},
            {"thinking": True},
            {"thinking": False},
            {"truncate": "middle"},
            {"truncate": "middle:64"},
        )
    }
    assert len(digests) == 10
    assert Grid.from_dict({**base, "repeats": 4}).digest == Grid.from_dict(base).digest
    again = Grid.from_dict({**base, "temperature": "0.6", "truncate": "middle:64"})
    assert Grid.from_dict(again.to_dict()) == again
    assert again.generation == GenerationFlags(temperature=0.6, truncate="middle:64")


def test_the_record_says_what_is_not_greedy_or_not_the_tasks_own() -> None:
    assert GenerationFlags(repeats=3).record(request(), thinks=False) == ""
    assert json.loads(GenerationFlags().record(request(sampling=WARM), thinks=True)) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "think_end": THOUGHT,
    }
    settings = GenerationFlags(max_new_tokens=9, thinking=False, truncate="middle")
    assert json.loads(settings.record(request(), thinks=False)) == {
        "max_new_tokens": 9,
        "thinking": False,
        "truncate": "middle",
    }


@pytest.mark.parametrize(
    "response",
    [
        "plain\n\nmore",
        "<think>a\n\nb</think>\n\nThe answer\n\nmore",
        "a</think>b</think>  last",
        "<think>never closed\n\nmore",
        "</think>",
        "",
    ],
)
@pytest.mark.parametrize("until", [(), ("\n\n",), ("more", "er", "")])
def test_what_is_scored_is_what_lm_eval_scores(response: str, until: tuple[str, ...]) -> None:
    theirs = postprocess_generated_text(response, list(until), THOUGHT)
    assert scored_text(response, until) == theirs


def test_a_context_keeps_its_first_and_its_last_half() -> None:
    context = list(range(100))
    cut = Truncation.parse("middle")
    assert cut.cut(context, 100) == context
    assert cut.cut(context, 10) == [0, 1, 2, 3, 4, 95, 96, 97, 98, 99]
    assert cut.cut(context, 7) == [0, 1, 2, 3, 97, 98, 99]
    assert cut.cut(context, 1) == [0]
    # Rooms of nearly the same size keep the same.
    long = list(range(5000))
    assert cut.cut(long, 2050) == cut.cut(long, 2110) != cut.cut(long, 2112)
    assert len(cut.cut(long, 2110)) == 2048
    assert str(Truncation.parse(" middle:64 ")) == "middle:64"
