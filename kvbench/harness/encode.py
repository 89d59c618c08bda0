"""Tokenisation of prompts: encoded once, then split into context and question."""

from __future__ import annotations

import functools
import hashlib
import json
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of a prompt as `split_encode` returns them."""
    backend = _backend(tokenizer) if tokenizer.is_fast else None
    if backend is None:
        token_ids = _encode(tokenizer, text)["input_ids"]
    else:  # skipping the offsets halves the time
        token_ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return len(_begin(tokenizer, token_ids, [])) + len(token_ids)


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
