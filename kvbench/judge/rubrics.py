"""What a judge is asked: versioned prompts as data files, and how its answer is read."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.decoding import THOUGHT
from kvbench.errors import UserError, nearest

Marks = Mapping[str, float]
"""What a judge gave: `{"score": 0.0 to 1.0}`, or a number for each criterion beside it."""

_FOLDER = Path(__file__).parent / "shipped"
_FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Rubric:
    """A prompt with fields, and how the answer to it is read.

    Attributes:
        name: As metrics name it, e.g. `longmemeval:temporal-reasoning`.
        version: Grows with every change of the prompt.
        source: Where the prompt is from.
        licence: SPDX name of the prompt's licence.
        template: The prompt; `{name}` is a field.
        parse: Name of the reading, one of `READINGS`.
        max_tokens: Limit of the judge's answer.
    """

    name: str
    version: str
    source: str
    licence: str
    template: str
    parse: str
    max_tokens: int

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the prompt, once each."""
        return tuple(dict.fromkeys(_FIELD.findall(self.template)))

    def render(self, item: Mapping[str, str]) -> str:
        """Fill in the prompt.

        What is filled in is not looked at again: a response that holds `{answer}` stays as it is.

        Raises:
            UserError: The item lacks a field, or has one that is no text.
        """
        for name in self.fields:
            if not isinstance(item.get(name), str):
                raise UserError(f"rubric {self.name}: an item needs the text {name!r}")
        return _FIELD.sub(lambda found: item[found[1]], self.template)

    def read(self, answer: str) -> Marks | None:
        """Read the judge's answer; None where it is no verdict.

        Only what follows a `</think>` counts; a thought that does not end is no verdict.
        """
        said = answer.rpartition(THOUGHT)[2]
        return None if "<think>" in said else READINGS[self.parse](said)


def rubric(name: str) -> Rubric:
    """Find a rubric.

    Args:
        name: `correct`, `longmemeval:temporal-reasoning`, or the path of a JSON file of one's own,
            `/path/mine.json` or `/path/mine.json:variant`.

    Raises:
        UserError: There is none of this name, or its file is not as it must be.
    """
    stem, _, variant = name.partition(":")
    data, templates = _file(stem)
    if variant not in templates:
        there = ", ".join(f"{stem}:{v}" if v else stem for v in templates)
        raise UserError(f"there is no rubric {name!r}; there are {there}")
    shared = {key: data[key] for key in ("version", "source", "licence", "parse", "max_tokens")}
    return Rubric(name=name, template=templates[variant], **shared)


def origin(name: str) -> str:
    """A rubric's file and version with a digest of its content, as the results record it.

    Args:
        name: As `rubric` takes it; a variant plays no part.
    """
    stem = name.partition(":")[0]
    data, _ = _file(stem)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:8]
    return f"{Path(stem).stem} {data['version']} ({digest})"


@functools.cache
def _file(stem: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of a rubric's file, and its templates by variant."""
    path = Path(stem) if stem.endswith(".json") else _FOLDER / f"{stem}.json"
    if not path.is_file():
        known = sorted(p.stem for p in _FOLDER.glob("*.json"))
        hint = nearest(stem, known) or f"; there are {', '.join(known)}"
        raise UserError(f"there is no rubric {stem!r}{hint}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the rubric {path}: {str(error).splitlines()[0]}") from None
    templates = data.get("templates") if isinstance(data, dict) else None
    if isinstance(data, dict) and isinstance(data.get("template"), str):
        templates = {"": data["template"]}
    kinds = {"version": str, "source": str, "licence": str, "parse": str, "max_tokens": int}
    if not isinstance(templates, dict) or not all(
        isinstance(data.get(key), kind) for key, kind in kinds.items()
    ):
        raise UserError(f"{path}: a rubric has {', '.join(kinds)} and template or templates")
    if data["parse"] not in READINGS:
        raise UserError(f"{path}: unknown parse {data['parse']!r}; there are {', '.join(READINGS)}")
    return data, templates


# --- readings -------------------------------------------------------------------------------------

_ECHO = re.compile(r"\b(?:yes|no)\b\s*(?:/|or|and)\s*\b(?:yes|no)\b")


def yes_no(answer: str) -> Marks | None:
    """1 for yes and 0 for no: the first word, or the only one of the two that occurs.

    `yes or no`, an answer with neither, and one that says both further on are no verdict.
    """
    low = answer.lower()
    words = re.findall(r"\w+", low)
    said = [word for word in words if word in ("yes", "no")]
    if not said or _ECHO.search(low):
        return None
    if words[0] not in ("yes", "no") and len(set(said)) > 1:
        return None
    return {"score": float(said[0] == "yes")}


def contains_yes(answer: str) -> Marks | None:
    """1 where the answer contains "yes" in any case, also within a word; else 0.

    This is the rule of LongMemEval's evaluation script. An empty answer is not a verdict.
    """
    if not answer.strip():
        return None
    return {"score": float("yes" in answer.lower())}


READINGS: dict[str, Callable[[str], Marks | None]] = {
    "yes_no": yes_no,
    "contains_yes": contains_yes,
}
"""How answers are read; a reading for several criteria gives a number for each, and `score`."""
