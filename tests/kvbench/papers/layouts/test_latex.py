"""Every table in LaTeX is what a strict reader accepts, and what TeX compiles where it is there."""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path

import pytest

from kvbench.papers.layouts.fill import fill
from kvbench.papers.layouts.from_papers import published_layout, published_layouts
from kvbench.papers.layouts.lay_out import lay_out
from kvbench.papers.layouts.pivot import Axes, pivot
from kvbench.papers.layouts.substitutes import Substitutes
from kvbench.tables.outputs import Format, format_table

from ...report.conftest import make_run
from ...tables.test_outputs import LETTERS
from .conftest import layout_run, measures_of, together
from .latex_checker import check

HOSTILE = r"a_b & $x^2$ \input{c} % # ~ {d} [e] *f --é中‮" + "\t<|>`"
FILLABLE = [name for name, one in published_layouts().items() if not one.lacking]
PAGE = r"""\documentclass{article}
\usepackage[utf8]{inputenc}
\usepackage{booktabs,graphicx}
\begin{document}
%s
\end{document}
"""


@functools.cache
def table(name: str) -> str:
    models = ("tiny_llama", HOSTILE) if name == "criticalkv-1" else (HOSTILE,)
    measures = measures_of(together(*(layout_run(name, model) for model in models)))
    layout = lay_out(published_layout(name), measures, Substitutes(), with_published=True)
    return format_table(fill(layout, measures, "full"), Format.LATEX)


@functools.cache
def free_table() -> str:
    policies = ("snapkv", f"./{HOSTILE}.py:P")
    tasks = ("vt", f"./{HOSTILE}.jsonl")
    measures = measures_of(make_run(policies, ("0.1", "0.2"), tasks, model=HOSTILE, samples=10))
    layout = pivot(measures, Axes(("budget", "policy"), ("task",), mean=True))
    return format_table(fill(layout, measures, "full"), Format.LATEX)


@pytest.mark.parametrize("name", FILLABLE)
def test_a_layout_is_sound_latex(name: str) -> None:
    check(table(name), LETTERS)


def test_a_table_of_hostile_names_is_sound_latex() -> None:
    check(free_table(), LETTERS)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (r"\_", "_"),
        (r"\textbf{", r"\textbf"),
        (" & ", " "),
        (r" \\", ""),
        (r"\end{tabular}", ""),
        (r"\%", "%"),
        (r"\textbf", r"\textbfoo"),
        ("$^{-}$", "$^{-}"),
        ("budget", "βudget"),
    ],
)
def test_the_reader_sees_what_does_not_compile(good: str, bad: str) -> None:
    text = free_table()
    assert good in text
    with pytest.raises(AssertionError):
        check(text.replace(good, bad, 1), LETTERS)


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="there is no pdflatex here")
def test_tex_compiles_all_tables(tmp_path: Path) -> None:
    letters = " ".join(sorted(LETTERS - set(map(chr, range(128)))))
    tables = [table(name) for name in FILLABLE]
    text = PAGE % "\n".join([letters, *tables, free_table()])
    (tmp_path / "page.tex").write_text(text, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    log = (tmp_path / "page.log").read_text(encoding="utf-8", errors="replace")
    assert "Missing character" not in log
    assert "Overfull" not in log, "a table is wider than its line"
