"""Equality of an answer and the reference: as text, as a number, or as an expression."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from kvbench_tasks.maths.bases import canonical, same_bases
from kvbench_tasks.maths.verifier import VERIFIER

_GAPS = re.compile(r"(?<=[\d,])(?:\\!\s*|\\[,;: ]|\{,\}(?=\d))+(?=[\d,])")
_SPACES = re.compile(r"(?<!\\)\\[!,;:> ]|~")  # but not the end of a matrix row
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_LONGEST = 1000


@functools.lru_cache(maxsize=1 << 16)
def equal(reference: str, answer: str) -> bool:
    r"""Return whether an answer equals the reference answer.

    In this order:

    1. the same text, apart from white space, a currency or percent sign, `$` around it, a full
       stop, wrappers such as `\text` and, where the reference has such a wrapper, case;
    2. the same number, where both are plain decimals (exactly, without thousands separators);
    3. not equal, where both have numerals with a base and these differ (`4210_5`, `4210_6`);
    4. the verdict of math-verify, which compares fractions, roots, sets, intervals, matrices and
       more.

    Args:
        reference: The reference answer, as LaTeX or as text.
        answer: The model's answer.
    """
    reference, answer = _clean(reference), _clean(answer)
    if not answer:
        return False
    plain_texts = _plain(reference), _plain(answer)
    if _WRAPPERS.search(reference):
        plain_texts = plain_texts[0].casefold(), plain_texts[1].casefold()
    if plain_texts[0] == plain_texts[1]:
        return True
    reference_value, answer_value = _number(reference), _number(answer)
    if reference_value is not None and answer_value is not None:
        return reference_value == answer_value
    if max(len(reference), len(answer)) > _LONGEST:
        return False
    if not same_bases(*map(_unwrapped, (reference, answer))):
        return False
    return VERIFIER(reference, answer)


def _clean(expression: str) -> str:
    # Collapse spaces: the steps below take quadratic time over long runs of spaces.
    expression = " ".join(_SPACES.sub(" ", _GAPS.sub("", expression)).split())
    for opening, closing in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(expression) > len(opening + closing) and expression.startswith(opening) and expression.endswith(closing):
            expression = expression[len(opening) : -len(closing)].strip()
    expression = re.sub(r"^\\?\$\s*", "", expression)
    expression = re.sub(r"(?<=[^.])\.$", "", expression)
    return re.sub(r"\s*\\?%$", "", expression).strip()


def _plain(expression: str) -> str:
    normalized = canonical(_unwrapped(expression)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", normalized)


def _unwrapped(expression: str) -> str:
    return _WRAPPERS.sub(r"\1", expression)


def _number(expression: str) -> Fraction | None:
    digits = expression.replace(",", "") if _GROUPED.fullmatch(expression) else expression
    return Fraction(digits) if len(digits) <= _LONGEST and _NUMBER.fullmatch(digits) else None
