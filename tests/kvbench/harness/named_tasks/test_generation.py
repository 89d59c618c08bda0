"""Settings of generations, as lm-eval normalises them."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.errors import UserError
from kvbench.harness.named_tasks.generation import generation_settings


def test_settings_are_those_of_lm_eval() -> None:
    found = generation_settings({"until": "\n", "max_new_tokens": "7", "num_beams": 1, "use_cache": True}, "mine")
    assert (found["until"], found["max_gen_toks"], found["do_sample"]) == (["\n"], 7, False)
    assert generation_settings({"until": None, "repetition_penalty": None}, "mine", 9)["max_gen_toks"] == 9
    assert generation_settings({"temperature": 0.7, "top_p": 0.9, "top_k": 3}, "mine")["do_sample"]


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        (
            {"repetition_penalty": 5.0},
            "mine: generation_kwargs: repetition_penalty=5.0 is not followed; there are until, ",
        ),
        ({"temprature": 0.5}, "temprature=0.5 is not followed; did you mean temperature"),
        ({"num_beams": 3}, "num_beams=3 is not followed"),
        ({"until": 5}, "until must be text or a list of texts, not 5"),
        ({"until": ["a", 5]}, "until must be text or a list of texts, not 5"),
        ({"max_gen_toks": "many"}, "mine: generation_kwargs: invalid literal for int"),
        ({"temperature": "x"}, "mine: generation_kwargs: could not convert string to float"),
    ],
)
def test_what_is_wrong_or_not_followed_is_refused(kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as raised:
        generation_settings(kwargs, "mine")
    assert says in str(raised.value)
