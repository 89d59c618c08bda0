r"""Numerals of different bases are different answers."""

from __future__ import annotations

import pytest

from kvbench_tasks.maths.bases import canonical, same_bases
from kvbench_tasks.maths.equal import equal


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("4210_5", "4210_6", False),  # math-verify drops the subscript of a number
        ("4210_5", "4210_{5}", True),
        ("4210_{5}", r"4210_{\text{five}}", True),
        ("4210_5", r"4210_{\text{base }6}", False),
        ("4210_5", "(4210)_5", True),
        ("4210_5", "04210_5", True),
        ("4210_5", "4211_5", False),
        ("4210_5", "555_{10}", False),  # the same number, but not in the base that is asked for
        ("4210_5", "4210", True),  # the problem names the base
        ("4210", "4210_5", True),
        ("4210_n", "4210_m", False),
        ("A2_{16}", "A2_{15}", False),
        ("2A_{16}", "2A_{16}", True),
        ("10.1_2", "10.1_3", False),
        ("x = 101_2", "101_3", False),
        ("x = 101_2", "101_2", True),
        ("-11_2", "-11_3", False),
        ("111_2, 1_3", "1_3, 111_2", True),
        ("111_2, 1_3", "111_3, 1_2", False),
        ("10_2 + 1_2", "11_2", True),
        ("2C_1", "2C_2", False),
        ("C_1 + 2C_1", "3C_1", True),  # symbols with an index, not numerals
        (r"\log_2 8", "3", True),
    ],
)
def test_numbers_with_a_base(gold: str, answer: str, same: bool) -> None:
    assert equal(gold, answer) is same


def test_numerals_are_written_in_one_way() -> None:
    written = canonical("4210_{5}, (17)_8, 1.10_{two} and 2C_1, x_1, 0_n")
    assert written == "4210_5, 17_8, 1.1_2 and 2C_1, x_1, 0_n"


@pytest.mark.parametrize("piece", ["1", "(", "_", "1_", "A", "(1)", "1.", "1_{", "F_2 "])
def test_long_texts_take_no_time(piece: str) -> None:
    text = piece * (1000 // len(piece))
    assert same_bases(text, text)
