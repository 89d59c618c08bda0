"""A comparison of two runs as JUnit XML, which CI systems show as tests."""

from __future__ import annotations

from xml.etree import ElementTree

from kvbench.regression.compare import Comparison, Outcome, Regression
from kvbench.regression.show import allowance, change_text, place_text
from kvbench.report.text import plain

_CHILD = {
    Outcome.FAILED: "failure",
    Outcome.NOT_COMPARED: "error",
    Outcome.NO_BASELINE: "skipped",
}


def junit(found: Regression, name: str) -> bytes:
    """Write a comparison as JUnit XML, a test case per cell of the baseline.

    A significant drop that is larger than allowed is a failure. A cell that cannot be compared is
    an error; where the baseline has no score, it is skipped.

    Args:
        found: The comparison.
        name: Name of the test suite.
    """
    root = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root, "testsuite", name=plain(name))
    suite.set("tests", str(len(found.cells)))
    for attribute, outcome in (
        ("failures", Outcome.FAILED),
        ("errors", Outcome.NOT_COMPARED),
        ("skipped", Outcome.NO_BASELINE),
    ):
        suite.set(attribute, str(len(found.of(outcome))))
    for cell in found.cells:
        _add_case(suite, cell)
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return bytes(text) + b"\n"


def _add_case(suite: ElementTree.Element, cell: Comparison) -> None:
    place = cell.pair.place
    # XML has no control characters, not even escaped; `plain` spells them out.
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=plain(f"{place.model}.{place.task}"),
        name=plain(place_text(place)),
    )
    said = plain(cell.reason or f"{cell.outcome}: {change_text(cell)}")
    child = _CHILD.get(cell.outcome)
    if child is None:
        ElementTree.SubElement(case, "system-out").text = said
        return
    element = ElementTree.SubElement(case, child, message=said)
    if cell.outcome is Outcome.FAILED:
        element.text = f"allowed: a drop of {allowance(cell)}"
