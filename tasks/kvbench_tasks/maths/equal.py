"""Decides whether an answer equals the reference: as text, as a number, or as an expression."""

from __future__ import annotations

import functools
import re
from fractions import Fraction

from kvbench_tasks.maths.bases import canonical, same_bases
from kvbench_tasks.maths.verifier import VERIFIER

_GAPS = re.compile(r"(?<=[\d,])(?:\\!\s*|\\[,;: ]|\{,\}(?=\d))+(?=[\d,])")
_SPACES = re.compile(r"(?<!\\)\\[!,;:> ]|~")  # but not the end of a matrix's row
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)")
_LONGEST = 1000


@functools.lru_cache(maxsize=1 << 16)
def equal(gold: str, answer: str) -> bool:
    r"""Whether an answer is equal to the reference answer.

    In this order:

    1. the same text, apart from white space, a currency or percent sign, `$` around it, a full
       stop, wrappers such as `\text` and, where the reference has such a wrapper, case;
    2. the same number, where both are plain decimals (exactly, without thousands separators);
    3. not equal, where both have numerals with a base and these differ (`4210_5`, `4210_6`);
    4. the verdict of math-verify, which compares fractions, roots, sets, intervals, matrices and
       more.

    Args:
        gold: The reference answer, as LaTeX or as text.
        answer: The model's answer.
    """
    gold, answer = _clean(gold), _clean(answer)
    if not answer:
        return False
    texts = _plain(gold), _plain(answer)
    if _WRAPPERS.search(gold):
        texts = texts[0].casefold(), texts[1].casefold()
    if texts[0] == texts[1]:
        return True
    x, y = _number(gold), _number(answer)
    if x is not None and y is not None:
        return x == y
    if max(len(gold), len(answer)) > _LONGEST:
        return False
    if not same_bases(*map(_unwrapped, (gold, answer))):
        return False
    return VERIFIER(gold, answer)


def _clean(text: str) -> str:
    # Single the spaces: the steps below would take quadratic time over long runs.
    text = " ".join(_SPACES.sub(" ", _GAPS.sub("", text)).split())
    for begin, end in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
            text = text[len(begin) : -len(end)].strip()
    text = re.sub(r"^\\?\$\s*", "", text)
    text = re.sub(r"(?<=[^.])\.$", "", text)
    return re.sub(r"\s*\\?%$", "", text).strip()


def _plain(text: str) -> str:
    same = canonical(_unwrapped(text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", same)


def _unwrapped(text: str) -> str:
    return _WRAPPERS.sub(r"\1", text)


def _number(text: str) -> Fraction | None:
    bare = text.replace(",", "") if _GROUPED.fullmatch(text) else text
    return Fraction(bare) if len(bare) <= _LONGEST and _NUMBER.fullmatch(bare) else None
