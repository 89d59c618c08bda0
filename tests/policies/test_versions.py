"""Versions of parts rise only where their results have changed."""

from __future__ import annotations

import pytest

from kvbench import registry
from kvbench.spelling import policy

RAISED = {
    "streaming_llm": {"score.recency": 2},
    "sirllm": {"score.surprisal": 2},
    "roco": {"score.roco": 2},
    "d2o": {"select.important_recent": 2},
    "cam": {"merge.value": 2},
    "simlayerkv": {"score.recency": 2},
    "cdpruner": {"score.cdpruner": 2},
    "dart": {"score.dart": 2},
    "prumerge": {"score.prumerge": 2},
    "visionzip": {"score.visionzip": 2},
    "duo_attention": {"score.sinks_recent": 2, "allocate.retrieval": 2},
}
VARIANTS = {
    "trimkv:variant=release": {"score.retention": 2},
    "defensivekv:variant=release": {"select.mass": 2},
    "layer_defensivekv:variant=release": {"select.mass": 2},
    "criticalkv:variant=release": {"select.two_stage": 2},
    "finch:variant=release": {"score.question_attention": 2},
    "rkv:variant=release": {},
    "snapkv:select=two_stage": {},
    "cdpruner:relevant=similar": {},
    "dart:variant=paper": {},
    "prumerge:variant=paper": {},
    "visionzip:variant=paper": {},
    "knorm:merge=value": {"merge.value": 2},
    "streaming_llm:sinks=1": {},
    "local:sinks=2": {"score.recency": 2},
    "roco:sinks=0": {},
    "d2o:sinks=1": {},
    "sirllm:sinks=0": {},
    "sirllm:sinks=0:variant=release": {},
}
NAMES = [n for n in registry.names(registry.POLICIES) if registry.origin(registry.POLICIES, n).startswith("kvbench==")]


@pytest.mark.parametrize("name", NAMES)
def test_only_policies_whose_results_changed_have_raised_versions(name: str) -> None:
    assert policy(name).part_versions == RAISED.get(name, {})


@pytest.mark.parametrize("spec", VARIANTS)
def test_a_version_depends_on_the_parameters_that_it_is_about(spec: str) -> None:
    assert policy(spec).part_versions == VARIANTS[spec]
