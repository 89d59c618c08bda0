"""Sentences of Python's own manual: text by people that every installation has."""

from __future__ import annotations

import functools
import hashlib
import re
from pydoc_data import topics


@functools.cache
def sentences() -> tuple[str, ...]:
    """Its plain sentences of 9 to 41 words, in the manual's order."""
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
    """16 hex digits of the sentences, which differ between releases of Python."""
    return hashlib.sha256("\n".join(sentences()).encode()).hexdigest()[:16]
