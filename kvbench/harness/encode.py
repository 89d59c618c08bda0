"""Tokenisation of prompts: encoded once, then split into context and question."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, quoted
from kvbench.harness.protocol import Continuation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Branch:
    """A measured text, and the tokens between the shared part of its prompt and the text.

    Attributes:
        lead_ids: Tokens before the text, at least one: its first token is measured after them.
        answer_ids: Tokens to measure.
        alone: Whether nothing precedes the lead.
    """

    lead_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    alone: bool = False

    @property
    def input_ids(self) -> tuple[int, ...]:
        """Return the tokens to feed: the last measured token is only predicted."""
        return (*self.lead_ids, *self.answer_ids[:-1])


def split_encode(tokenizer: PreTrainedTokenizerBase, *segments: str) -> tuple[list[int], ...]:
    """Tokenise a prompt and split it where the context ends.

    The whole string is tokenised once, so the ids are the same as without a split. The split is the token boundary at
    or before the end of a part; a token that straddles it belongs to the next part. Leading special tokens (BOS) are
    added once, unless the text already has them, as with chat templates. Trailing special tokens (EOS) are left out,
    because the prompt continues. A slow tokenizer has no offsets, so its parts are tokenised separately.

    Args:
        tokenizer: Tokenizer of the model.
        segments: Adjacent parts of one text: context, question and more.

    Returns:
        Token ids of every part; the first part has BOS.
    """
    if tokenizer.is_fast:
        encoding = _encoding(tokenizer, "".join(segments))
        token_ids: list[int] = encoding.ids
        segment_ends = list(accumulate(map(len, segments)))
        boundaries = [
            0,
            *(_cut(encoding, end, segment_ends[-1]) for end in segment_ends[:-1]),
            len(token_ids),
        ]
        encoded_parts = [token_ids[start:stop] for start, stop in pairwise(boundaries)]
    else:
        encoded_parts = [_encode(tokenizer, segment)["input_ids"] if segment else [] for segment in segments]
    encoded_parts[0] = (
        _begin(
            tokenizer,
            encoded_parts[0],
            [token for segment in encoded_parts[1:] for token in segment],
        )
        + encoded_parts[0]
    )
    return tuple(encoded_parts)


def _cut(encoding: Any, offset: int, end_offset: int) -> int:
    """Return the index of the first token beyond character `offset`, in a text of `end_offset` characters."""
    # Look tokens up one by one, because a list of all offsets takes as long as tokenising.
    token_indices = (encoding.char_to_token(character_index) for character_index in range(offset, end_offset))
    boundary = next((token_index for token_index in token_indices if token_index is not None), len(encoding))
    while boundary and encoding.token_to_chars(boundary - 1)[1] > offset:
        boundary -= 1
    return int(boundary)


def encode_continuations(
    tokenizer: PreTrainedTokenizerBase, context: str, continuations: Sequence[Continuation]
) -> tuple[list[int], list[int], list[Branch]]:
    """Tokenise continuations as lm-eval's `hf` model does, and split their prompts into what they share and the rest.

    White space at the end of a prompt belongs to the measured text. Prompt and text are tokenised together; the tokens
    beyond those of the prompt alone are measured.

    Args:
        tokenizer: Tokenizer of the model.
        context: The text that all prompts begin with.
        continuations: The texts, with the rest of their prompts.

    Returns:
        Tokens of the context, tokens that all prompts share after it, and a branch for each continuation. Without a
        context text, the context is all that the prompts share. If they share nothing, the context is empty and all
        branches are alone.

    Raises:
        UserError: A text adds no tokens to its prompt.
    """
    prompts = {
        continuation.question: _prompt_ids(tokenizer, context, continuation.question)
        for continuation in continuations
        if not continuation.alone
    }
    encoded_prompts = [token_ids for token_ids, _ in prompts.values()]
    # Every branch keeps the last token of its prompt, so that a text of one token is measured after compression.
    most_shared = max(0, min(map(len, encoded_prompts), default=0) - 1)
    shared_ids = _common_start(encoded_prompts)[:most_shared]
    context_length = min((*(boundary for _, boundary in prompts.values()), len(shared_ids))) or len(shared_ids)
    branches = []
    for continuation in continuations:
        prompt_text = "" if continuation.alone else context + continuation.question
        prompt_ids = [] if continuation.alone else prompts[continuation.question][0]
        lead_ids, answer_ids = _continued(tokenizer, prompt_text, prompt_ids, continuation.text)
        is_alone = continuation.alone or not shared_ids
        if not is_alone:
            lead_ids = lead_ids[len(shared_ids) :]
        branches.append(Branch(tuple(lead_ids), tuple(answer_ids), is_alone))
    return shared_ids[:context_length], shared_ids[context_length:], branches


def encode_windows(tokenizer: PreTrainedTokenizerBase, text: str, window: int) -> list[Branch]:
    """Tokenise a whole text and split it into windows as lm-eval's `loglikelihood_rolling`.

    Args:
        tokenizer: Tokenizer of the model.
        text: The text.
        window: Maximum number of tokens of a window; 0: unlimited.
    """
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    token_ids = encode(tokenizer, text)
    windows = get_rolling_token_windows(token_ids, _prefix_id(tokenizer), window or max(1, len(token_ids)), 1)
    return [
        Branch(tuple(lead_ids), tuple(answer_ids), alone=True)
        for lead_ids, answer_ids in map(make_disjoint_window, windows)
    ]


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, context: str, question: str) -> tuple[list[int], int]:
    """Return the tokens of a prompt without the white space at its end, and how many belong to its context."""
    text = (context + question).rstrip()
    if not context + question:
        return [_prefix_id(tokenizer)], 0
    if not tokenizer.is_fast:
        token_ids = encode(tokenizer, text)
        return token_ids, len(_common_start([token_ids, encode(tokenizer, context)]))
    encoding = _encoding(tokenizer, text)
    boundary = _cut(encoding, min(len(context), len(text)), len(text))
    leading_ids = _begin(tokenizer, encoding.ids, [])
    return [*leading_ids, *encoding.ids], boundary and len(leading_ids) + boundary


def _continued(
    tokenizer: PreTrainedTokenizerBase, prompt: str, prompt_ids: list[int], text: str
) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt and those of a text that follows it."""
    if prompt:
        answer_ids = encode(tokenizer, prompt + text)[len(prompt_ids) :]
        prompt_ids = prompt_ids or [_prefix_id(tokenizer)]  # nothing but white space
    else:
        prompt_ids, answer_ids = [_prefix_id(tokenizer)], encode(tokenizer, text, special_tokens=False)
        if answer_ids[:1] == prompt_ids:
            answer_ids = answer_ids[1:]
    if not answer_ids:
        raise UserError(f"the continuation {quoted(text)} adds no tokens to its prompt; change it or leave it out")
    return prompt_ids, answer_ids


def _common_start(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Return the tokens that all sequences begin with."""
    columns = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*sequences, strict=False))
    return [tokens[0] for tokens in columns]


def _prefix_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that stands before a text without a prompt."""
    token_id = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token_id is None:
        raise UserError(
            "the tokenizer has neither a BOS nor an EOS token, so texts without a prompt cannot be measured"
        )
    return int(token_id)


def encode(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    """Tokenise a text; leading special tokens as for `split_encode`, if `special_tokens`."""
    backend = _backend(tokenizer) if tokenizer.is_fast else None
    if backend is None:
        token_ids = list(_encode(tokenizer, text)["input_ids"])
    else:  # skipping the offsets halves the time
        token_ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return [*(_begin(tokenizer, token_ids, []) if special_tokens else ()), *token_ids]


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of a prompt as `split_encode` returns them."""
    return len(encode(tokenizer, text))


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything that decides how a prompt is tokenised, including the chat template.

    Returns:
        16 hex digits. Padding and truncation settings, which callers change, do not count.
    """
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    return hashlib.sha256((_model_hash(tokenizer) + template).encode()).hexdigest()[:16]


@functools.lru_cache(maxsize=8)
def _model_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    content: Any
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        content = {key: value for key, value in content.items() if key not in ("truncation", "padding")}
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map]
    serialised = json.dumps([content, _leading(tokenizer)], sort_keys=True, default=str)
    return hashlib.sha256(serialised.encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _leading(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids that the tokenizer puts before a text: BOS or nothing."""
    bare_ids = _encode(tokenizer, "a")["input_ids"]
    full_ids = tokenizer("a", verbose=False)["input_ids"]
    for offset in range(len(full_ids) - len(bare_ids) + 1):
        if full_ids[offset : offset + len(bare_ids)] == bare_ids:
            return tuple(full_ids[:offset])
    return ()


def _begin(tokenizer: PreTrainedTokenizerBase, head_ids: list[int], tail_ids: list[int]) -> list[int]:
    leading_ids = list(_leading(tokenizer))
    return [] if (head_ids + tail_ids)[: len(leading_ids)] == leading_ids else leading_ids


def _encoding(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """Return the ids of a text with their offsets."""
    backend = _backend(tokenizer)
    if backend is None:
        return _encode(tokenizer, text).encodings[0]
    return backend.encode(text, add_special_tokens=False)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the Rust tokenizer, set up for texts of any length; None if Python code adds to it."""
    from transformers import PreTrainedTokenizerFast

    tokenizer_class = type(tokenizer)
    encode_methods = (tokenizer_class.__call__, getattr(tokenizer_class, "_encode_plus", None))
    if encode_methods != (PreTrainedTokenizerFast.__call__, PreTrainedTokenizerFast._encode_plus):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = getattr(tokenizer, "split_special_tokens", False)
    return backend


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    # verbose=False suppresses a warning about texts beyond the tokenizer's own maximum.
    return tokenizer(text, add_special_tokens=False, verbose=False)
