"""Prompts are tokenised as the model would be given them, and parted at a token boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizer

from kvbench.harness.encode import count_tokens, split_encode, tokenizer_hash

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
