"""Compare kvbench with the stock model for every decoder family of transformers: `python -m benchmarks.families`.

All families take two minutes on an idle core. The exit code is 1 if kvbench is wrong for a family: neither equal to the
oracle nor refused in one line. `--out docs/models.md` writes the table; `benchmarks/family_checks.py` has the checks.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers

from benchmarks.family_checks import COLUMNS, TOLERANCE, FamilyResult, Outcome, examine
from benchmarks.family_models import FAMILIES, NOT_TRIED, Family, unknown_types
from benchmarks.wrong_input import refused
from kvbench.errors import unknown

BEGIN, END = "<!-- begin: benchmarks.families -->\n", "<!-- end: benchmarks.families -->\n"
HEADINGS = dict(zip(COLUMNS, COLUMNS, strict=True)) | {"run": "in a run", "decoding": "while decoding"}


def line(result: FamilyResult) -> str:
    """Return a result in one line for the terminal."""
    if result.status == "refused":
        return f"refused: {result.prefill.refusal}"
    outcomes = [f"{HEADINGS[column]} {outcome.text}" for column, outcome in result.outcomes.items()]
    return f"{result.status}: {', '.join(outcomes)}"


def summary(results: Sequence[FamilyResult]) -> str:
    """Return the numbers of families by status in one sentence."""
    counts = {status: sum(result.status == status for result in results) for status in ("right", "refused", "wrong")}
    return (
        f"Of {len(results)} families, with transformers {transformers.__version__}: {counts['right']} right, "
        f"{counts['refused']} refused, {counts['wrong']} wrong."
    )


def page(text: str, results: Sequence[FamilyResult]) -> str:
    """Return a page with a new table between its two marks.

    Raises:
        SystemExit: The page lacks a mark.
    """
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"the page lacks a line {BEGIN.strip()} or {END.strip()}")
    return f"{before}{BEGIN}{chr(10).join(block(results))}\n{END}{after}"


def block(results: Sequence[FamilyResult]) -> Iterator[str]:
    """Return the lines between the marks."""
    yield from ("", _wrapped(summary(results)), "")
    supported = [result for result in results if result.status != "refused"]
    yield f"| family | attention | {' | '.join(HEADINGS.values())} |"
    yield f"| --- | --- |{' --- |' * len(COLUMNS)}"
    for result in supported:
        cells = [_cell(outcome) for outcome in result.outcomes.values()]
        yield f"| `{result.family}` | {result.kind} | {' | '.join(cells)} |"
    yield ""
    yield from _listed(
        (f"{HEADINGS[column]}: {_without_name(outcome, result)}", result.family)
        for result in supported
        for column, outcome in result.outcomes.items()
        if outcome.refusal or outcome.failure or outcome.note
    )
    yield from ("### Refused families", "", "| family | message |", "| --- | --- |")
    for result in results:
        if result.status == "refused":
            yield f"| `{result.family}` | {result.prefill.refusal} |"
    yield from ("", "Not tried are:", "")
    for reason, names in NOT_TRIED.items():
        listed_names = ", ".join(f"`{name}`" for name in names.split())
        yield _wrapped(f"- {reason}: {listed_names}", "  ")
    yield ""


def _cell(outcome: Outcome) -> str:
    """Return the mark of an outcome; a star refers to the notes."""
    if outcome.is_wrong:
        return "**wrong** \\*"
    if outcome.error is None:
        return "no \\*" if outcome.refusal else "– \\*"
    return "yes \\*" if outcome.note else "yes"


def _without_name(outcome: Outcome, result: FamilyResult) -> str:
    """Return what a note says of several families."""
    return (outcome.refusal or outcome.failure or outcome.note).replace(result.family.partition("+")[0], "this family")


def _listed(notes: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return a list of notes, each with its families."""
    families: dict[str, list[str]] = defaultdict(list)
    for note, family in notes:
        families[note].append(f"`{family}`")
    for note, names in families.items():
        yield _wrapped(f"- {', '.join(names)}: {note}", "  ")
    if families:
        yield ""


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def chosen_families(names: Sequence[str]) -> list[Family]:
    """Return the named families, or all that the installed transformers has.

    Raises:
        UserError: A name is unknown.
    """
    known_names = {family.name for family in FAMILIES}
    unknown_names = sorted({*names} - known_names)
    if unknown_names:
        raise unknown("family", unknown_names[0], known_names)
    return [family for family in FAMILIES if family.exists and (not names or family.name in names)]


def examine_all(families: Sequence[Family]) -> list[FamilyResult]:
    """Examine families one by one and print each result."""
    results = []
    for number, family in enumerate(families, 1):
        results.append(examine(family))
        print(f"[{number}/{len(families)}] {family.name} ({results[-1].seconds:.1f} s) {line(results[-1])}", flush=True)
    return results


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers: its notes on tiny configurations, and a progress bar per model."""
    previous_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.utils.logging.enable_progress_bar()
        logging.disable(previous_level)


@refused()
def main(arguments: Sequence[str] | None = None) -> int:
    """Examine families, print a line for each, and write or check the page."""
    parser = argparse.ArgumentParser(description="Compare kvbench with the stock model, family by family.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to examine; default: all")
    parser.add_argument("--out", type=Path, metavar="PAGE", help="write the table into this page, between its marks")
    parser.add_argument(
        "--check", type=Path, metavar="PAGE", help="exit with 1 if the table of this page is out of date"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all errors, refusals and notes to this file")
    options = parser.parse_args(arguments)
    if options.families and (options.out or options.check):
        parser.error("a page needs all families; leave their names out")
    torch.set_num_threads(1)
    families = chosen_families(options.families)
    with quiet():
        results = examine_all(families)
    print(f"{summary(results)} Right is within {TOLERANCE} standard deviations of the logits.")
    for model_type in [] if options.families else unknown_types():
        print(f"{model_type} is new in transformers {transformers.__version__}; add it to benchmarks/family_models.py")
    if options.json:
        options.json.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n", encoding="utf-8")
    if options.out:
        options.out.write_text(page(options.out.read_text(encoding="utf-8"), results), encoding="utf-8")
    is_outdated = False
    if options.check:
        text = options.check.read_text(encoding="utf-8")
        is_outdated = page(text, results) != text
        if is_outdated:
            print(f"{options.check} is out of date; run python -m benchmarks.families --out {options.check}")
    return int(is_outdated or any(result.status == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
