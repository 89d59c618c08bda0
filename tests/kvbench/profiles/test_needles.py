"""The needle of a prompt is found to the token."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.protocol import Request
from kvbench.profiles.needles import find_needles, token_span
from kvbench.runs.worker import Prompt

from ...loading import load_task


def request(context: str, answer: str, question: str = "what?", **extra: str) -> Request:
    return Request("t", "0", 0, 0, "c", context, question, (), 5, (answer,), extra)


def prompt(tokenizer: Any, given: Request) -> Prompt:
    head, tail = split_encode(tokenizer, given.context, given.question)
    return Prompt(given, tuple(head), tuple(tail))


class Slow:
    """A tokenizer without offsets."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._own = tokenizer

    def __call__(self, text: str, return_offsets_mapping: bool = False, **options: Any) -> Any:
        assert not return_offsets_mapping
        return self._own(text, **options)

    def decode(self, ids: list[int]) -> str:
        text: str = self._own.decode(ids)
        return text

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._own.get_vocab()
        return vocabulary

    @property
    def special_tokens_map(self) -> dict[str, str]:
        return {"bos_token": "<|bos|>"}


def loaded(tokenizer: Any, lexicon: str, samples: int, cache: Path, template: bool) -> list[Prompt]:
    task = load_task(
        "niah_depth",
        None,
        tokenizer,
        cache,
        length=160 if lexicon == "reference" else 300,
        samples=samples,
        seed=3,
        lexicon=lexicon,
        chat_template=template,
    )
    return [prompt(tokenizer, r) for r in task.requests]


@pytest.mark.parametrize("template", [False, True], ids=["plain", "chat template"])
def test_needles_of_the_needle_task_with_a_bpe_tokenizer(
    template: bool, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    needles = find_needles(bpe_tokenizer, loaded(bpe_tokenizer, "natural", 11, tmp_path, template))
    assert len(needles) == 11
    for found in needles:
        ids = [*found.prompt.context_ids, *found.prompt.question_ids]
        (value,) = found.prompt.request.target
        text = bpe_tokenizer.decode(ids[found.start : found.stop]).strip()
        assert re.fullmatch(rf"One of the special magic numbers for \S+ is: {value}\.", text)
        # Not a token more on either side.
        inner = bpe_tokenizer.decode(ids[found.start + 1 : found.stop - 1])
        assert not inner.strip().startswith("One of")
        assert not inner.endswith(".")


def test_needles_of_the_needle_task_in_the_reference_lexicon(
    word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for found in find_needles(word_tokenizer, loaded(word_tokenizer, "reference", 22, tmp_path, False)):
        ids = [*found.prompt.context_ids, *found.prompt.question_ids]
        text = word_tokenizer.decode(ids[found.start : found.stop])
        key = found.prompt.request.question.split()[1]
        assert text == f"note {key} {found.prompt.request.target[0]} ."
        assert found.start >= 1  # behind BOS


@pytest.mark.parametrize("of", ["bpe_tokenizer", "word_tokenizer"])
def test_a_slow_tokenizer_finds_the_same_tokens(of: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tokenizer = request.getfixturevalue(of)
    lexicon = "natural" if of == "bpe_tokenizer" else "reference"
    fast = loaded(tokenizer, lexicon, 11, tmp_path, False)
    slow = Slow(tokenizer)
    apart = [prompt(slow, p.request) for p in fast]
    for a, b in zip(find_needles(tokenizer, fast), find_needles(slow, apart), strict=True):
        one = [*a.prompt.context_ids, *a.prompt.question_ids][a.start : a.stop]
        other = [*b.prompt.context_ids, *b.prompt.question_ids][b.start : b.stop]
        assert one == other


def test_a_token_that_straddles_the_needle_belongs_to_it(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    context = "It rains.  Some say the code is 71 93! They are wrong."
    for make in (lambda t: t, Slow):
        tokenizer = make(bpe_tokenizer)
        (found,) = find_needles(tokenizer, [prompt(tokenizer, request(context, "71 93"))])
        ids = [*found.prompt.context_ids, *found.prompt.question_ids]
        assert bpe_tokenizer.decode(ids[found.start : found.stop]).strip() == ("Some say the code is 71 93!")


def test_characters_within_a_token_give_the_whole_token(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    context = "Some examine the late castle."
    first, last = context.index("examine"), context.index("castle")
    for tokenizer in (bpe_tokenizer, Slow(bpe_tokenizer)):
        given = prompt(tokenizer, request(context, "late"))
        ids = [*given.context_ids, *given.question_ids]
        for start in range(first, first + 3):
            for stop in range(last + 1, last + 6):
                a, b = token_span(tokenizer, given, start, stop)
                text = bpe_tokenizer.decode(ids[a:b])
                assert context[start:stop] in text
                assert context[start:stop] not in bpe_tokenizer.decode(ids[a + 1 : b])
                assert context[start:stop] not in bpe_tokenizer.decode(ids[a : b - 1])


def test_of_several_sentences_it_is_the_one_that_is_asked_for(
    word_tokenizer: PreTrainedTokenizerFast,
) -> None:
    from kvbench.reference.grammar import WORDS

    a, b, c, d, e, f = WORDS[:6]
    context = f"{c} {a} {b} {d} . note {e} {a} {b} . {f} {a} {b} . "
    (found,) = find_needles(word_tokenizer, [prompt(word_tokenizer, request(context, f"{a} {b}", f"<q> {e}"))])
    assert (found.start, found.stop) == (6, 11)


def test_a_task_may_say_what_its_needle_is(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    given = request("Alas. Late, the code is 7, he said. It", "7", needle="the code is 7")
    (found,) = find_needles(bpe_tokenizer, [prompt(bpe_tokenizer, given)])
    ids = [*found.prompt.context_ids, *found.prompt.question_ids]
    assert bpe_tokenizer.decode(ids[found.start : found.stop]).strip() == "the code is 7"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda r: dataclasses.replace(r, target=("8",)), "is not in the context"),
        (lambda r: dataclasses.replace(r, target=("",)), "is not in the context"),
        (lambda r: dataclasses.replace(r, target=("7", "9")), "2 answers"),
        (
            lambda r: dataclasses.replace(r, extra={"needle": "no"}),
            "the needle is not in the context",
        ),
    ],
)
def test_what_is_no_needle_task_is_said_in_one_line(
    change: Callable[[Request], Request], says: str, bpe_tokenizer: PreTrainedTokenizerFast
) -> None:
    given = change(request("The code is 7. It rains.", "7"))
    with pytest.raises(UserError, match=says) as error:
        find_needles(bpe_tokenizer, [prompt(bpe_tokenizer, given)])
    assert "\n" not in str(error.value)


def test_tokens_that_do_not_read_as_the_needle_are_refused(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    good = prompt(bpe_tokenizer, request("The code is 7193. It rains.", "7193"))
    ids = tuple(reversed(good.context_ids))
    with pytest.raises(UserError, match="cannot locate the needle's tokens"):
        find_needles(bpe_tokenizer, [Prompt(good.request, ids, good.question_ids)])
