"""Sentences of Python's own manual: human-written text present in every installation."""

from __future__ import annotations

import functools
import hashlib
import re
from pydoc_data import topics


@functools.cache
def sentences() -> tuple[str, ...]:
    """Return its plain sentences of 9 to 41 words, in the manual's order."""
    plain_sentences = []
    for topic in sorted(topics.topics):
        for paragraph in topics.topics[topic].split("\n\n"):
            joined_text = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.:]) ", joined_text):
                is_plain = re.fullmatch(r"[A-Z][\w ,;'()\"./-]+[.:]", sentence)
                if is_plain and 8 <= sentence.count(" ") <= 40:
                    plain_sentences.append(sentence)
    return tuple(plain_sentences)


@functools.cache
def digest() -> str:
    """Return 16 hex digits over the sentences, which differ between Python releases."""
    return hashlib.sha256("\n".join(sentences()).encode()).hexdigest()[:16]
