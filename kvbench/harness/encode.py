"""From prompt text to token ids: tokenised once, split into context and question."""

from __future__ import annotations

import functools
import hashlib
import json
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def split_encode(tokenizer: PreTrainedTokenizerBase, *parts: str) -> tuple[list[int], ...]:
    """Tokenise a prompt and split it where the context ends.

    The whole string is tokenised once, so the ids are the same as without a split. The cut is the
    token boundary at or before the end of a part; a token that straddles it belongs to the next
    part. Leading special tokens (BOS) are added once, unless the text already has them, as with
    chat templates. Trailing special tokens (EOS) are left out, because the prompt continues. A slow
    tokenizer has no offsets, so its parts are tokenised separately.

    Args:
        tokenizer: Tokenizer of the model.
        parts: Adjacent parts of one text: context, question and more.

    Returns:
        Token ids of every part; the first part has BOS.
    """
    if tokenizer.is_fast:
        encoded = _encoding(tokenizer, "".join(parts))
        ids: list[int] = encoded.ids
        ends = list(accumulate(map(len, parts)))
        cuts = [0, *(_cut(encoded, end, ends[-1]) for end in ends[:-1]), len(ids)]
        made = [ids[a:b] for a, b in pairwise(cuts)]
    else:
        made = [_encode(tokenizer, part)["input_ids"] if part else [] for part in parts]
    made[0] = _begin(tokenizer, made[0], [i for part in made[1:] for i in part]) + made[0]
    return tuple(made)


def _cut(encoded: Any, at: int, end: int) -> int:
    """Index of the first token that ends beyond character `at`, in a text of `end` characters."""
    # Single lookups: a list of all offsets takes as long as tokenising.
    found = (encoded.char_to_token(char) for char in range(at, end))
    cut = next((token for token in found if token is not None), len(encoded))
    while cut and encoded.token_to_chars(cut - 1)[1] > at:
        cut -= 1
    return int(cut)


def count_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of a prompt, as `split_encode` returns them."""
    backend = _backend(tokenizer) if tokenizer.is_fast else None
    if backend is None:
        ids = _encode(tokenizer, text)["input_ids"]
    else:  # without offsets it takes half the time
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return len(_begin(tokenizer, ids, [])) + len(ids)


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
        content = {k: v for k, v in content.items() if k not in ("truncation", "padding")}
    else:
        content = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map]
    text = json.dumps([content, _leading(tokenizer)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _leading(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The ids that the tokenizer puts in front of a text: BOS or nothing."""
    bare = _encode(tokenizer, "a")["input_ids"]
    full = tokenizer("a", verbose=False)["input_ids"]
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == bare:
            return tuple(full[:at])
    return ()


def _begin(tokenizer: PreTrainedTokenizerBase, head: list[int], tail: list[int]) -> list[int]:
    first = list(_leading(tokenizer))
    return [] if (head + tail)[: len(first)] == first else first


def _encoding(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    """The ids of a text, with their offsets."""
    backend = _backend(tokenizer)
    if backend is None:
        return _encode(tokenizer, text).encodings[0]
    return backend.encode(text, add_special_tokens=False)


def _backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Rust tokenizer, set up for texts of any length; None if Python code adds to it."""
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    own = (kind.__call__, getattr(kind, "_encode_plus", None))
    if own != (PreTrainedTokenizerFast.__call__, PreTrainedTokenizerFast._encode_plus):
        return None
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = getattr(tokenizer, "split_special_tokens", False)
    return backend


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Any:
    # verbose=False suppresses a warning about texts beyond the tokenizer's own maximum.
    return tokenizer(text, add_special_tokens=False, verbose=False)
