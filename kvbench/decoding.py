"""Decoding of answers: sampling parameters and the thinking text of reasoning models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.errors import UserError

THINK, THOUGHT = "<think>", "</think>"
"""Tags around a model's thinking."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer; None stands for greedy decoding.

    Logits are divided by the temperature, then restricted to the `top_k` largest, then to the smallest set of tokens
    with total probability `top_p`, in the order of transformers.

    Attributes:
        temperature: Above 0.
        top_p: Above 0 and at most 1; 1 keeps all tokens.
        top_k: At least 1; 0 keeps all tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise UserError(f"the temperature must be above 0, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 1 (or 0 for all tokens), not {self.top_k}")


def from_yaml(kwargs: Mapping[str, Any], yaml_label: str) -> Sampling | None:
    """Parse the sampling parameters in `generation_kwargs` of an lm-eval YAML, as lm-eval does.

    Args:
        kwargs: Without `do_sample`, a temperature above 0 means sampling. With `do_sample: true`, the default
            temperature is 1.
        yaml_label: The name of the task, for messages.

    Raises:
        UserError: A value is out of range.
    """
    temperature = kwargs.get("temperature")
    do_sample = kwargs.get("do_sample")
    if do_sample is None:
        do_sample = bool(temperature)
    if not do_sample:
        return None
    try:
        return Sampling(
            1.0 if temperature is None else float(temperature),
            float(kwargs.get("top_p") or 1.0),
            int(kwargs.get("top_k") or 0),
        )
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{yaml_label}: generation_kwargs in its YAML: {error}") from None


@dataclass(frozen=True)
class Thinking:
    """Ids of the tokens that open and close the thinking; -1 for a token that the tokenizer lacks."""

    open: int
    close: int

    @classmethod
    def of(cls, tokenizer: Any) -> Thinking | None:
        """Return the ids for a tokenizer; None if it has no token that closes the thinking."""
        token_ids = [_token(tokenizer, marker_text) for marker_text in (THINK, THOUGHT)]
        return None if token_ids[1] < 0 else cls(*token_ids)


def _token(tokenizer: Any, marker_text: str) -> int:
    """Return the id of a token; -1 if the tokenizer lacks it."""
    token_id = tokenizer.convert_tokens_to_ids(marker_text)
    return -1 if token_id is None or tokenizer.convert_ids_to_tokens(token_id) != marker_text else int(token_id)


def scored_text(response: str, until: Sequence[str]) -> str:
    """Return the part of a response to score: the text after the thinking, cut at the first stop string.

    As in lm-eval with `think_end_token`. If the thinking is not closed, the whole response is scored.
    """
    thought, end_marker, remainder = response.rpartition(THOUGHT)
    answer = remainder.lstrip() if end_marker else thought + remainder
    stop_positions = [answer.find(stop_text) for stop_text in until if stop_text and stop_text in answer]
    return answer[: min(stop_positions)] if stop_positions else answer
