"""InfiniteBench's measures (src/compute_scores.py of its repository), as called by lm-eval.

Each takes a response and the row's `outputs`, and returns 0 to 1. README.md names the commit.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from kvbench import metrics

Answers = Sequence[str]

_MARKS = "\n:\"'.,?!{}"
_OPTION_PREFIXES = ("answer is:", "is:", "answer:", "correct option is:")
_CHOICE_PREFIXES = ("answer is:", "answer:", "answer is", "option is")


def score(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score the response with the row's `measure`."""
    return {"score": float(_MEASURES[doc["measure"]](results[0], doc["outputs"]))}


def first_number(response: str, answers: Answers) -> bool:
    """Return whether the first run of digits equals the answer's."""
    match = re.search(r"[0-9]+", response)
    return match is not None and match[0] == answers[0]


def word(response: str, answers: Answers) -> bool:
    """Return whether the answer is one of the words, separated by white space and all marks but `-`."""
    return answers[0] in _blank(response, _MARKS).split()


def name(response: str, answers: Answers) -> bool:
    """Return whether the first name is one of the response's words, in capitals."""
    return answers[0] in _blank(response, _MARKS).upper().split()


def value(response: str, answers: Answers) -> bool:
    """Return whether the first number, with or without decimals, has the answer's value, ignoring signs."""
    match = re.search(r"\d+\.\d+|\d+", response)
    return match is not None and float(match[0]) == float(answers[0])


def last_number(response: str, answers: Answers) -> bool:
    """Return whether the last word is an integer equal to the answer."""
    words = _blank(response, "\n.`'\":").split()
    try:
        return bool(words) and int(words[-1]) == int(answers[0])
    except ValueError:
        return False


def steps(response: str, answers: Answers) -> float:
    """Return the fraction of values that are correct before the first wrong one, ignoring signs."""
    correct_count = 0
    for numeral, expected in zip(re.findall(r"[0-9]+", response), answers, strict=False):
        # Compared as text, because Python refuses to parse the very long numbers of a repetitive model.
        if (numeral.lstrip("0") or "0") != str(int(expected)):
            break
        correct_count += 1
    return correct_count / len(answers)


def choice(response: str, answers: Answers) -> bool:
    """Return whether a choice of A to D is correct; `answers` are the option and its letter.

    The first match decides: a letter at the beginning; the whole response as an option; the text after "answer is:",
    "answer:", "answer is" or "option is"; a word that is a letter.
    """
    reply = response.strip()
    if not reply:
        return False
    if reply[0] in "ABCD":
        return reply[0] in answers
    if reply in answers:
        return True
    reply = _single(_blank(reply, "\n\"'.,?!{}"))
    for prefix in _CHOICE_PREFIXES:
        if prefix in reply:
            return _follows(reply, prefix, answers)
    return next((candidate for candidate in reply.split() if candidate in "ABCD"), "") in answers


def option(response: str, answers: Answers) -> bool:
    """Return whether the response names the function among A to D; `answers` are its name and its letter.

    The response begins with the letter and a full stop or a colon; or name or letter follows the first of "answer is:",
    "is:", "answer:" and "correct option is:" in the response.
    """
    reply = response.strip()
    if reply[:2] in (f"{answers[1]}.", f"{answers[1]}:"):
        return True
    reply = _bare_option(reply)
    for prefix in _OPTION_PREFIXES:
        if prefix in reply:
            return _follows(reply, prefix, answers)
    return False


def kvpress_name(response: str, answers: Answers) -> bool:
    """Return whether the response contains one of the names, ignoring case."""
    return any(answer.upper() in response.upper() for answer in answers)


def kvpress_choice(response: str, answers: Answers) -> bool:
    """Apply `choice`, or compare the last standalone letter of the first line with one."""
    return _alone(response, "A-D") in answers or choice(response, answers)


def kvpress_option(response: str, answers: Answers) -> bool:
    """`option`, or whether the last letter that stands alone in its line is right.

    That line is the first one with a letter that stands alone. A response that begins with the name
    or the letter is right too.
    """
    if _alone(response, "A-J") == answers[1]:
        return True
    has_prefix = _bare_option(response.strip()).startswith(tuple(answers))
    return has_prefix or option(response, answers)


def _alone(response: str, letters: str) -> str:
    """The last of the letters that stands alone, of the first line that has one; or ""."""
    match = re.search(rf"\b[{letters}]\b(?!.*\b[{letters}]\b)", response)
    return match[0] if match else ""


def _follows(reply: str, prefix: str, answers: Answers) -> bool:
    """Whether one of the answers stands one character after a prefix."""
    return reply.partition(prefix)[2][1:].startswith(tuple(answers))


def _bare_option(reply: str) -> str:
    for character in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        reply = reply.replace(character, " ")
    return _single(reply)


def _blank(text: str, marks: str) -> str:
    return text.translate(str.maketrans(marks, " " * len(marks)))


def _single(text: str) -> str:
    return re.sub(" {2,}", " ", text)


_MEASURES: dict[str, Callable[[str, Answers], bool | float]] = {
    "first_number": first_number,
    "word": word,
    "name": name,
    "value": value,
    "last_number": last_number,
    "steps": steps,
    "choice": choice,
    "option": option,
    "f1": functools.partial(metrics.best, metrics.f1),
    "rouge_lsum": metrics.rouge_lsum,
    "kvpress_name": kvpress_name,
    "kvpress_choice": kvpress_choice,
    "kvpress_option": kvpress_option,
}
