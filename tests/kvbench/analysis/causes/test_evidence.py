"""The evidence of a prompt is found to the token, in one passage or several."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvbench.analysis.causes.evidence import EvidenceSpans, column_mask, find_evidence
from kvbench.analysis.causes.lost import common_opening
from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.protocol import Request
from kvbench.runs.answers import Prompt

CONTEXT = "The sun is warm. The code of Ann is 8841. It rains. The code of Bob is 7310! The end is near. "


def prompt(tokenizer: Any, *targets: str, context: str = CONTEXT) -> Prompt:
    request = Request("t", "0", 0, 0, "c", context, "What are the codes of Ann and Bob?", (), 5, targets)
    head, tail = split_encode(tokenizer, request.context, request.question)
    return Prompt(request, tuple(head), tuple(tail))


def texts(tokenizer: Any, asked: Prompt, spans: Any) -> list[str]:
    return [tokenizer.decode(asked.ids[start:stop]).strip() for start, stop in spans]


def test_every_needle_is_a_passage_of_its_own(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    asked = prompt(bpe_tokenizer, "8841", "7310")
    found = find_evidence(bpe_tokenizer, asked, None)
    assert found.source == "sentence"
    assert texts(bpe_tokenizer, asked, found.spans) == ["The code of Ann is 8841.", "The code of Bob is 7310!"]
    assert texts(bpe_tokenizer, asked, found.target_spans) == ["8841", "7310"]
    mask = column_mask(found.spans, len(asked.ids))
    assert int(mask.sum()) == sum(stop - start for start, stop in found.spans)


def test_targets_and_expressions(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    asked = prompt(bpe_tokenizer, "8841")
    target = find_evidence(bpe_tokenizer, asked, "target")
    regex = find_evidence(bpe_tokenizer, asked, r"is \d+")
    assert texts(bpe_tokenizer, asked, target.spans) == ["8841"]
    assert texts(bpe_tokenizer, asked, regex.spans) == ["is 8841", "is 7310"]
    assert texts(bpe_tokenizer, asked, regex.target_spans) == ["8841"] and regex.source == "regex"


def test_an_answer_that_the_context_lacks_is_searched_for_unless_it_was_asked_for(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    asked = prompt(bpe_tokenizer, "9999")
    assert find_evidence(bpe_tokenizer, asked, None) == EvidenceSpans((), (), "")
    present = prompt(bpe_tokenizer, "8841")
    searched = find_evidence(bpe_tokenizer, present, "search")
    assert (searched.spans, texts(bpe_tokenizer, present, searched.target_spans)) == ((), ["8841"])
    with pytest.raises(UserError, match="does not occur in the context"):
        find_evidence(bpe_tokenizer, asked, "sentence")
    with pytest.raises(UserError, match="matches nothing"):
        find_evidence(bpe_tokenizer, asked, "purple")


def test_the_opening_is_what_all_contexts_share() -> None:
    assert common_opening([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3)]) == 2
    assert common_opening([(1, 2)]) == 0 and common_opening([(1, 2), (1, 2)]) == 2
