"""Comparison of two runs as JUnit XML, which CI systems display as tests."""

from __future__ import annotations

from xml.etree import ElementTree

from kvbench.regression.compare import Comparison, Outcome, Regression
from kvbench.regression.show import allowance, change_text, place_text
from kvbench.tables.text import plain

_CHILD = {
    Outcome.FAILED: "failure",
    Outcome.NOT_COMPARED: "error",
    Outcome.NO_BASELINE: "skipped",
}


def junit(result: Regression, suite_name: str) -> bytes:
    """Return a comparison as JUnit XML, a test case per cell of the baseline.

    A significant drop that is larger than allowed is a failure. A cell that cannot be compared is an error, or skipped
    if the baseline has no score.
    """
    root_element = ElementTree.Element("testsuites")
    suite = ElementTree.SubElement(root_element, "testsuite", name=plain(suite_name))
    suite.set("tests", str(len(result.cells)))
    for attribute, outcome in (
        ("failures", Outcome.FAILED),
        ("errors", Outcome.NOT_COMPARED),
        ("skipped", Outcome.NO_BASELINE),
    ):
        suite.set(attribute, str(len(result.of(outcome))))
    for comparison in result.cells:
        _add_case(suite, comparison)
    ElementTree.indent(root_element)
    xml_text = ElementTree.tostring(root_element, encoding="utf-8", xml_declaration=True)
    return bytes(xml_text) + b"\n"


def _add_case(suite: ElementTree.Element, comparison: Comparison) -> None:
    place = comparison.pair.place
    # XML forbids control characters, even escaped; `plain` spells them out.
    case_element = ElementTree.SubElement(
        suite,
        "testcase",
        classname=plain(f"{place.model}.{place.task}"),
        name=plain(place_text(place)),
    )
    message = plain(comparison.reason or f"{comparison.outcome}: {change_text(comparison)}")
    child_tag = _CHILD.get(comparison.outcome)
    if child_tag is None:
        ElementTree.SubElement(case_element, "system-out").text = message
        return
    element = ElementTree.SubElement(case_element, child_tag, message=message)
    if comparison.outcome is Outcome.FAILED:
        element.text = f"allowed: a drop of {allowance(comparison)}"
