"""Prompts are tokenised as the model would be given them, and parted at a token boundary."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.models.huggingface import HFLM
from tokenizers import processors
from transformers import PreTrainedTokenizer

from kvbench.errors import UserError
from kvbench.harness.encode import (
    count_tokens,
    encode_continuations,
    encode_windows,
    split_encode,
    tokenizer_hash,
)
from kvbench.harness.protocol import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(
    st.one_of(
        st.text(max_size=12),
        st.sampled_from(["The ", "sky", " blue", ".\n", "\n\n", "  ", "<|im_end|>", "ü", "🜁"]),
    ),
    max_size=8,
).map("".join)


def whole_of(head: list[int], tail: list[int]) -> list[int]:
    return head + tail


@many
@given(texts, texts)
def test_parts_joined_are_the_whole_tokenised_at_once(
    bpe_tokenizer: PreTrainedTokenizerFast, context: str, question: str
) -> None:
    head, tail = split_encode(bpe_tokenizer, context, question)
    whole = bpe_tokenizer(context + question)["input_ids"]
    assert head + tail == whole
    assert count_tokens(bpe_tokenizer, context + question) == len(whole)


@many
@given(texts, texts, texts)
def test_what_is_given_after_a_prompt_is_the_rest_of_the_whole(
    bpe_tokenizer: PreTrainedTokenizerFast, context: str, question: str, after: str
) -> None:
    parts = split_encode(bpe_tokenizer, context, question, after)
    assert [*parts[0], *parts[1], *parts[2]] == bpe_tokenizer(context + question + after)["input_ids"]
    head, rest = split_encode(bpe_tokenizer, context, question + after)
    assert (parts[0], parts[1] + parts[2]) == (head, rest)
    assert parts[2] == split_encode(bpe_tokenizer, context + question, after)[1]


@many
@given(st.text("ab .\n", max_size=30), st.text("ab .\n", min_size=1, max_size=30))
def test_the_cut_is_the_last_boundary_within_the_context(
    bpe_tokenizer: PreTrainedTokenizerFast, context: str, question: str
) -> None:
    head, tail = split_encode(bpe_tokenizer, context, question)
    before = bpe_tokenizer.decode(head[1:])
    assert context.startswith(before)
    assert len(before) + len(bpe_tokenizer.decode(tail[:1])) > len(context)


@many
@given(texts, texts)
def test_the_cut_is_the_first_token_that_ends_beyond_the_context(
    bpe_tokenizer: PreTrainedTokenizerFast,
    word_tokenizer: PreTrainedTokenizerFast,
    context: str,
    question: str,
) -> None:
    for tokenizer in (bpe_tokenizer, word_tokenizer):
        made = tokenizer(context + question, add_special_tokens=False, return_offsets_mapping=True)
        ends = [end for _, end in made["offset_mapping"]]
        cut = next((i for i, end in enumerate(ends) if end > len(context)), len(ends))
        assert split_encode(tokenizer, context, question)[1] == made["input_ids"][cut:]


def test_what_a_caller_has_set_on_the_tokenizer_does_no_harm(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = "the sky is blue <|im_end|> " * 20
    whole = bpe_tokenizer(text)["input_ids"]
    bpe_tokenizer(text, truncation=True, max_length=5)
    assert count_tokens(bpe_tokenizer, text) == len(whole)
    bpe_tokenizer([text, "a"], padding="max_length", max_length=2000)
    assert whole_of(*split_encode(bpe_tokenizer, "", text)) == whole
    bpe_tokenizer(text, truncation=True, max_length=5)
    assert whole_of(*split_encode(bpe_tokenizer, text, "")) == whole


def test_a_tokenizer_with_a_way_of_its_own_is_asked_itself(
    bpe_tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(bpe_tokenizer)

    class Doubling(kind):  # type: ignore[misc, valid-type]
        def __call__(self, text: str, **options: Any) -> Any:
            return super().__call__(text + text, **options)

    monkeypatch.setattr(bpe_tokenizer, "__class__", Doubling)
    twice = kind.__call__(bpe_tokenizer, "ab cd ab cd ", add_special_tokens=False)["input_ids"]
    assert count_tokens(bpe_tokenizer, "ab cd ") == 1 + len(twice)
    assert whole_of(*split_encode(bpe_tokenizer, "ab ", "cd "))[1:] == twice


def test_a_straddling_token_goes_to_the_question(bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    (token,) = bpe_tokenizer(" mountain", add_special_tokens=False)["input_ids"]
    head, tail = split_encode(bpe_tokenizer, "the moun", "tain")
    assert head == bpe_tokenizer("the")["input_ids"]
    assert tail == bpe_tokenizer(" moun" + "tain", add_special_tokens=False)["input_ids"]
    assert split_encode(bpe_tokenizer, "the mountain", "")[0][-1] == token


def test_a_chat_template_brings_bos_and_no_second_is_added(
    bpe_tokenizer: PreTrainedTokenizerFast,
) -> None:
    text = bpe_tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    bos = bpe_tokenizer.bos_token_id
    for context, question in ((text, "y"), ("", text), (text[:4], text[4:])):
        head, tail = split_encode(bpe_tokenizer, context, question)
        assert (head + tail).count(bos) == 1
        assert (head + tail)[0] == bos
    assert split_encode(bpe_tokenizer, "x", "y")[0][0] == bos


def test_no_end_token_follows_a_prompt(word_tokenizer: PreTrainedTokenizerFast) -> None:
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    both = PreTrainedTokenizerFast(
        tokenizer_object=type(word_tokenizer.backend_tokenizer).from_str(word_tokenizer.backend_tokenizer.to_str()),
        bos_token="<bos>",
        eos_token="<eos>",
    )
    both.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    assert both("note .")["input_ids"][-1] == 2
    head, tail = split_encode(both, "note ", "let .")
    assert head + tail == both("note let .")["input_ids"][:-1]


class SlowTokenizer(PreTrainedTokenizer):
    """Letters, with a BOS; it has no offsets."""

    def __init__(self, **options: Any) -> None:
        self.letters = {chr(c): c for c in range(128)} | {"<s>": 128}
        super().__init__(bos_token="<s>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.letters)

    def get_vocab(self) -> dict[str, int]:
        return dict(self.letters)

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.letters.get(token, 0)

    def build_inputs_with_special_tokens(self, a: list[int], b: Any = None) -> list[int]:
        return [128, *a]


def test_a_slow_tokenizer_gets_the_parts_apart() -> None:
    tokenizer = SlowTokenizer()
    assert not tokenizer.is_fast
    bos = [128] if tokenizer("a")["input_ids"][0] == 128 else []
    head, tail = split_encode(tokenizer, "ab", "cd")
    assert (head, tail) == ([*bos, 97, 98], [99, 100])
    assert len(tokenizer_hash(tokenizer)) == 16


def test_the_hash_sees_template_and_vocabulary_but_not_padding(
    bpe_tokenizer: PreTrainedTokenizerFast, word_tokenizer: PreTrainedTokenizerFast
) -> None:
    before = tokenizer_hash(bpe_tokenizer)
    bpe_tokenizer(["a", "b c"], padding=True, truncation=True, max_length=7)
    assert tokenizer_hash(bpe_tokenizer) == before
    assert tokenizer_hash(word_tokenizer) != before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe_tokenizer, "chat_template", "{{ messages }}")
        assert tokenizer_hash(bpe_tokenizer) != before


class Recorded(HFLM):  # type: ignore[misc]
    """lm-eval's `hf` without a model, which notes what it would measure."""

    def __init__(self, tokenizer: Any, window: int = 0) -> None:
        self.tokenizer, self.backend, self.add_bos_token = tokenizer, "causal", None
        self.custom_prefix_token_id, self._max_length, self.batch_size_per_gpu = None, window, 1
        self._rank, self._world_size, self.enable_thinking = 0, 1, False
        self.cache_hook = CacheHook(None)
        self.measured: list[tuple[list[int], list[int]]] = []

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        self.measured += [(context_ids, answer_ids) for _, context_ids, answer_ids in requests]
        return [(0.0, False)] * len(requests)


def instances(*arguments: tuple[str, ...]) -> list[Instance]:
    return [Instance("loglikelihood", {}, entry, 0) for entry in arguments]


@pytest.fixture(scope="session", params=["bpe_tokenizer", "without_bos"])
def any_tokenizer(request: pytest.FixtureRequest, bpe_tokenizer: PreTrainedTokenizerFast) -> Any:
    """A tokenizer that puts BOS first, and one that does not."""
    if request.param == "bpe_tokenizer":
        return bpe_tokenizer
    tokenizer = copy.deepcopy(bpe_tokenizer)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


@many
@given(texts, st.lists(st.tuples(texts, texts, st.booleans()), min_size=1, max_size=4))
def test_continuations_have_the_tokens_of_lm_evals_hf(
    any_tokenizer: Any, context: str, parts: list[tuple[str, str, bool]]
) -> None:
    continuations = [Continuation(question, text, alone) for question, text, alone in parts]
    hf = Recorded(any_tokenizer)
    asked = [("" if entry.alone else context + entry.question, entry.text) for entry in continuations]
    try:
        hf.loglikelihood(instances(*asked), disable_tqdm=True)
    except IndexError:  # an empty text after an empty prompt
        hf.measured.append(([], []))
    if not all(answer_ids for _, answer_ids in hf.measured):
        with pytest.raises(UserError, match="adds no tokens"):
            encode_continuations(any_tokenizer, context, continuations)
        return
    context_ids, question_ids, branches = encode_continuations(any_tokenizer, context, continuations)
    shared_ids = [*context_ids, *question_ids]
    for branch, (prompt_ids, answer_ids), entry in zip(branches, hf.measured, continuations, strict=True):
        lead_ids = [*(() if branch.alone else shared_ids), *branch.lead_ids]
        if prompt_ids:  # `hf` cannot measure after a prompt of white space without BOS
            assert lead_ids == prompt_ids
        assert list(branch.answer_ids) == answer_ids
        assert branch.lead_ids and branch.alone == (entry.alone or not context_ids)
    together = {tuple(branch.lead_ids) for branch in branches if not branch.alone}
    if len(together) > 1 and min(map(len, together)) > 1:  # nothing more is shared
        assert len({lead_ids[0] for lead_ids in together}) > 1


@many
@given(st.text("ab .\n", max_size=30), st.text("ab .\n", max_size=30), st.text("ab", min_size=1, max_size=9))
def test_the_context_of_continuations_ends_where_a_prompt_is_cut(
    any_tokenizer: Any, context: str, question: str, text: str
) -> None:
    try:
        context_ids, question_ids, (branch,) = encode_continuations(
            any_tokenizer, context, [Continuation(question, text)]
        )
    except UserError:
        return
    prompt = (context + question).rstrip()
    head, tail = split_encode(any_tokenizer, prompt[: len(context)], prompt[len(context) :])
    text_begins = len(any_tokenizer(prompt[:0])["input_ids"])
    if len(head) > text_begins and tail:
        assert context_ids == head
        assert [*question_ids, *branch.lead_ids] == tail
    elif not branch.alone:  # without a context text, all but the last token
        assert [*context_ids, *branch.lead_ids] == [*head, *tail] and len(branch.lead_ids) == 1


@many
@given(texts, st.integers(1, 12))
def test_windows_are_those_of_lm_evals_hf(any_tokenizer: Any, text: str, window: int) -> None:
    hf = Recorded(any_tokenizer, window)
    hf.loglikelihood_rolling(instances((text,)), disable_tqdm=True)
    windows = encode_windows(any_tokenizer, text, window)
    assert [([*branch.lead_ids], [*branch.answer_ids]) for branch in windows] == hf.measured
    assert all(len(branch.input_ids) <= window for branch in windows)
    assert sum(len(branch.answer_ids) for branch in encode_windows(any_tokenizer, text, 0)) == len(hf.tok_encode(text))
