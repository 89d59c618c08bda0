"""What a judge is asked: versioned prompts in data files, and how the answers are read."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.benchmark import Marks
from kvbench.decoding import THOUGHT
from kvbench.errors import UserError, unknown

_FOLDER = Path(__file__).parent / "shipped"
_FIELD = re.compile(r"\{([a-z_]+)\}")
_KEYS = {"version": str, "source": str, "licence": str, "parse": str, "max_tokens": int}


@dataclass(frozen=True)
class Rubric:
    """A prompt with fields, and how its answer is read.

    Attributes:
        name: As in `Ask.rubric`, such as `longmemeval:temporal-reasoning`.
        template: The prompt; `{name}` is a field.
        version: Rises with every change of the prompt.
        parse: How the answer is read: a key of `READINGS`.
        max_tokens: Limit of the judge's answer.
        ratings: What is rated from 1 to 10, if the answer is read as ratings; the last is the
            overall rating.
    """

    name: str
    template: str
    version: str
    parse: str
    max_tokens: int
    ratings: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of the prompt, once each."""
        return tuple(dict.fromkeys(_FIELD.findall(self.template)))

    def render(self, fields: Mapping[str, str]) -> str:
        """Fill in the prompt, in one pass: a response that contains `{answer}` stays as it is.

        Raises:
            UserError: A field is missing or not a text.
        """
        for name in self.fields:
            if not isinstance(fields.get(name), str):
                raise UserError(f"rubric {self.name}: the field {name!r} must be a text")
        return _FIELD.sub(lambda match: fields[match[1]], self.template)

    def read(self, answer: str) -> Marks | None:
        """Read the judge's answer after its thinking; None if it contains no verdict."""
        verdict = answer.rpartition(THOUGHT)[2]
        if "<think>" in verdict:
            return None
        reading = READINGS[self.parse]
        return reading(verdict, self.ratings) if self.ratings else reading(verdict)


def rubric(name: str) -> Rubric:
    """Find a rubric.

    Args:
        name: `correct`, `longmemeval:temporal-reasoning`, or the path of a JSON file, such as
            `/path/mine.json` or `/path/mine.json:variant`.

    Raises:
        UserError: There is no such rubric, or its file is not valid.
    """
    stem, _, variant = name.partition(":")
    data, templates = _file(stem)
    if variant not in templates:
        raise unknown("rubric", name, [f"{stem}:{v}" if v else stem for v in templates])
    rated = tuple(data.get("ratings", ()))
    known = (data["version"], data["parse"], data["max_tokens"], rated)
    return Rubric(name, templates[variant], *known)


def origin(name: str) -> str:
    """A rubric's file and version with a digest of its content, as the results record it.

    Args:
        name: As for `rubric`; the variant is ignored.
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
        raise unknown("rubric", stem, sorted(shipped.stem for shipped in _FOLDER.glob("*.json")))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the rubric {path}: {str(error).splitlines()[0]}") from None
    data = data if isinstance(data, dict) else {}
    templates = {"": data["template"]} if "template" in data else data.get("templates")
    valid = all(isinstance(data.get(key), kind) for key, kind in _KEYS.items())
    if not valid or not isinstance(templates, dict) or not _are_texts(templates.values()):
        raise UserError(f"{path}: a rubric needs {', '.join(_KEYS)}, and template or templates")
    rated = data.get("ratings", [])
    if not isinstance(rated, list) or not _are_texts(rated):
        raise UserError(f"{path}: ratings must be a list of names")
    if (data["parse"] == "ratings") != bool(rated):
        raise UserError(f"{path}: a rubric with the reading ratings must list what it rates")
    if data["parse"] not in READINGS:
        raise UserError(f"{path}: {unknown('parse', data['parse'], READINGS)}")
    return data, templates


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


# --- readings -------------------------------------------------------------------------------------

_OBJECT = re.compile(r"\{[^{}]*\}")
_BOTH = re.compile(r"\b(?:yes|no)\b\s*(?:/|or|and)\s*\b(?:yes|no)\b")


def yes_no(answer: str) -> Marks | None:
    """1 for yes, 0 for no: the first word, or the only one of the two in the answer.

    An answer with neither word has no verdict, nor one that repeats "yes or no".
    """
    low = answer.lower()
    words = re.findall(r"\w+", low)
    verdicts = [word for word in words if word in ("yes", "no")]
    if not verdicts or _BOTH.search(low):
        return None
    if words[0] not in verdicts and len(set(verdicts)) > 1:
        return None
    return {"score": float(verdicts[0] == "yes")}


def contains_yes(answer: str) -> Marks | None:
    """1 if the answer contains "yes" in any case, even within a word, otherwise 0.

    This is the rule of LongMemEval's evaluation script. An empty answer has no verdict.
    """
    return {"score": float("yes" in answer.lower())} if answer.strip() else None


def ratings(answer: str, names: Sequence[str]) -> Marks | None:
    """Ratings from 1 to 10, from the last JSON object of the answer, as marks from 0.1 to 1.

    `score` is the last of the names. An answer that lacks one of them, or has a rating that is not
    a whole number from 1 to 10, has no verdict.
    """
    objects = _OBJECT.findall(answer)
    try:
        found = json.loads(objects[-1].replace("'", '"')) if objects else {}
        given = {name: found[name] for name in names}
    except (ValueError, KeyError, RecursionError):
        return None
    if not given or not all(type(v) is int and 1 <= v <= 10 for v in given.values()):
        return None
    marks = {name: value / 10 for name, value in given.items()}
    return {"score": marks.pop(names[-1]), **marks}


READINGS: dict[str, Callable[..., Marks | None]] = {
    "yes_no": yes_no,
    "contains_yes": contains_yes,
    "ratings": ratings,
}
"""How answers are read. The marks contain `score` and, for several criteria, further numbers."""
