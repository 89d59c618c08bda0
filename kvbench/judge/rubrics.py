"""Rubrics: versioned judge prompts in data files, and parsers of the judge's answers."""

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
    """A prompt with fields, and the parser of its answer.

    Attributes:
        name: As in `Ask.rubric`, such as `longmemeval:temporal-reasoning`.
        template: The prompt; `{name}` is a field.
        version: Increases with every change of the prompt.
        parse: Parser of the answer: a key of `READINGS`.
        max_tokens: Limit of the judge's answer.
        ratings: Names of the 1-10 ratings in the judge's answer; the last is the overall score.
        system: The system message before the prompt; "" for none.
    """

    name: str
    template: str
    version: str
    parse: str
    max_tokens: int
    ratings: tuple[str, ...] = ()
    system: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """Return the fields of the prompt, once each."""
        return tuple(dict.fromkeys(_FIELD.findall(self.template)))

    def render(self, fields: Mapping[str, str]) -> str:
        """Fill in the prompt in one pass, so that a response that contains `{answer}` stays unchanged.

        Raises:
            UserError: A field is missing or not a text.
        """
        for field_name in self.fields:
            if not isinstance(fields.get(field_name), str):
                raise UserError(f"rubric {self.name}: the field {field_name!r} must be a text")
        return _FIELD.sub(lambda match: fields[match[1]], self.template)

    def read(self, answer: str) -> Marks | None:
        """Parse the judge's answer after its thinking; None if it contains no verdict."""
        verdict = answer.rpartition(THOUGHT)[2]
        if "<think>" in verdict:
            return None
        reading = READINGS[self.parse]
        return reading(verdict, self.ratings) if self.ratings else reading(verdict)


def rubric(name: str) -> Rubric:
    """Return a rubric by name.

    Args:
        name: `correct`, `longmemeval:temporal-reasoning`, or the path of a JSON file, such as `/path/mine.json` or
            `/path/mine.json:variant`.

    Raises:
        UserError: There is no such rubric, or its file is invalid.
    """
    file_stem, _, variant = name.partition(":")
    rubric_data, templates = _file(file_stem)
    if variant not in templates:
        raise unknown(
            "rubric",
            name,
            [f"{file_stem}:{variant_name}" if variant_name else file_stem for variant_name in templates],
        )
    rating_names = tuple(rubric_data.get("ratings", ()))
    settings = (
        rubric_data["version"],
        rubric_data["parse"],
        rubric_data["max_tokens"],
        rating_names,
        rubric_data.get("systems", {}).get(variant, ""),
    )
    return Rubric(name, templates[variant], *settings)


def origin(name: str) -> str:
    """Return a rubric's file and version with a digest of its content, as recorded in the results.

    Args:
        name: As for `rubric`; the variant is ignored.
    """
    file_stem = name.partition(":")[0]
    rubric_data, _ = _file(file_stem)
    digest = hashlib.sha256(json.dumps(rubric_data, sort_keys=True).encode()).hexdigest()[:8]
    return f"{Path(file_stem).stem} {rubric_data['version']} ({digest})"


@functools.cache
def _file(file_stem: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the content of a rubric's file, and its templates by variant."""
    rubric_path = Path(file_stem) if file_stem.endswith(".json") else _FOLDER / f"{file_stem}.json"
    if not rubric_path.is_file():
        raise unknown("rubric", file_stem, sorted(shipped.stem for shipped in _FOLDER.glob("*.json")))
    try:
        rubric_data = json.loads(rubric_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the rubric {rubric_path}: {str(error).splitlines()[0]}") from None
    rubric_data = rubric_data if isinstance(rubric_data, dict) else {}
    templates = {"": rubric_data["template"]} if "template" in rubric_data else rubric_data.get("templates")
    is_valid = all(isinstance(rubric_data.get(key), value_type) for key, value_type in _KEYS.items())
    if not is_valid or not isinstance(templates, dict) or not _are_texts(templates.values()):
        raise UserError(f"{rubric_path}: a rubric needs {', '.join(_KEYS)}, and template or templates")
    systems = rubric_data.get("systems", {})
    if not isinstance(systems, dict) or not systems.keys() <= templates.keys() or not _are_texts(systems.values()):
        raise UserError(f"{rubric_path}: systems must map variants of the templates to texts")
    rating_names = rubric_data.get("ratings", [])
    if not isinstance(rating_names, list) or not _are_texts(rating_names):
        raise UserError(f"{rubric_path}: ratings must be a list of names")
    if (rubric_data["parse"] == "ratings") != bool(rating_names):
        raise UserError(f"{rubric_path}: a rubric with the reading ratings must list what it rates")
    if rubric_data["parse"] not in READINGS:
        raise UserError(f"{rubric_path}: {unknown('parse', rubric_data['parse'], READINGS)}")
    return rubric_data, templates


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


# --- readings -------------------------------------------------------------------------------------

_OBJECT = re.compile(r"\{[^{}]*\}")
_RATING = re.compile(r"\[\[([0-9]+\.?[0-9]*)\]\]")
_SINGLE_BRACKETS = re.compile(r"\[([0-9]+\.?[0-9]*)\]")
_BOTH = re.compile(r"\b(?:yes|no)\b\s*(?:/|or|and)\s*\b(?:yes|no)\b")


def yes_no(answer: str) -> Marks | None:
    """Return 1 for yes, 0 for no: the first word, or the only one of the two in the answer.

    An answer without either word has no verdict, nor has one that repeats "yes or no".
    """
    lowered = answer.lower()
    words = re.findall(r"\w+", lowered)
    verdicts = [word for word in words if word in ("yes", "no")]
    if not verdicts or _BOTH.search(lowered):
        return None
    if words[0] not in verdicts and len(set(verdicts)) > 1:
        return None
    return {"score": float(verdicts[0] == "yes")}


def contains_yes(answer: str) -> Marks | None:
    """Return 1 if the answer contains "yes" in any case, even within a word, otherwise 0.

    This is the rule of LongMemEval's evaluation script. An empty answer has no verdict.
    """
    return {"score": float("yes" in answer.lower())} if answer.strip() else None


def ratings(answer: str, criteria: Sequence[str]) -> Marks | None:
    """Return ratings from 1 to 10, from the last JSON object of the answer, as marks from 0.1 to 1.

    `score` is the last rating. An answer that lacks one of them, or has a rating that is not an integer from 1 to 10,
    has no verdict.
    """
    objects = _OBJECT.findall(answer)
    try:
        parsed = json.loads(objects[-1].replace("'", '"')) if objects else {}
        raw_ratings = {criterion: parsed[criterion] for criterion in criteria}
    except (ValueError, KeyError, RecursionError):
        return None
    if not raw_ratings or not all(type(rating) is int and 1 <= rating <= 10 for rating in raw_ratings.values()):
        return None
    marks = {criterion: rating_value / 10 for criterion, rating_value in raw_ratings.items()}
    return {"score": marks.pop(criteria[-1]), **marks}


def rating(answer: str) -> Marks | None:
    """Return the first rating in double brackets (otherwise in single ones) as a mark from 0.1 to 1.

    This is the rule of MT-Bench's `run_judge_single`. An answer without a rating, or with one that is not from 1 to 10,
    has no verdict.
    """
    match = _RATING.search(answer) or _SINGLE_BRACKETS.search(answer)
    value = float(match[1]) if match else 0.0
    return {"score": value / 10} if 1 <= value <= 10 else None


READINGS: dict[str, Callable[..., Marks | None]] = {
    "yes_no": yes_no,
    "contains_yes": contains_yes,
    "ratings": ratings,
    "rating": rating,
}
"""Parsers of answers. The marks contain `score` and, for several criteria, further numbers."""
