"""Sentences of Python's own manual: text by people that every installation has."""

from __future__ import annotations

import functools
import hashlib
import re
from pydoc_data import topics


@functools.cache
def sentences() -> tuple[str, ...]:
    """Its plain sentences of 9 to 41 words, in the manual's order."""
    found = []
    for name in sorted(topics.topics):
        for paragraph in topics.topics[name].split("\n\n"):
            text = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.:]) ", text):
                is_plain = re.fullmatch(r"[A-Z][\w ,;'()\"./-]+[.:]", sentence)
                if is_plain and 8 <= sentence.count(" ") <= 40:
                    found.append(sentence)
    return tuple(found)


@functools.cache
def digest() -> str:
    """16 hex digits of the sentences, which differ between releases of Python."""
    return hashlib.sha256("\n".join(sentences()).encode()).hexdigest()[:16]
