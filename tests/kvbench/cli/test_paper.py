"""Figures and tables in a two-column paper, as a reader of docs/report.md and docs/tables.md would put them there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.cli import call

from ..leaderboard.conftest import save_run
from ..report.conftest import make_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("pdflatex"), reason="there is no pdflatex here"),
]

_PAPER = r"""\documentclass[10pt,twocolumn]{article}
\usepackage[textwidth=7in,columnsep=0.3in,textheight=9in]{geometry}
%s
\begin{document}
\section{Results}
%s
\begin{figure}\includegraphics{front}\caption{One benchmark.}\end{figure}
\begin{figure}\includegraphics{needles}\caption{One task.}\end{figure}
%s
\end{document}
"""


@pytest.fixture(scope="module")
def paper(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The compiled paper, and the log of pdflatex."""
    folder = tmp_path_factory.mktemp("paper")
    policies = ["snapkv", "criticalkv", "keydiff:window=8", "streaming_llm", "random"]
    run = save_run(folder / "run", make_run(policies, ("0.1", "0.2", "0.4"), ["vt", "niah_multikey_1"], samples=40))
    labels = ["--label", "snapkv=SnapKV", "--label", "criticalkv=Ours"]
    figures = ["--width", "3.3", "--format", "pdf", "--no-title", *labels, "--quiet"]
    assert call(["report", str(run), *figures]) == 0
    shutil.copy(run / "report" / "figures" / "mean-ruler.pdf", folder / "front.pdf")
    shutil.copy(run / "report" / "figures" / "pareto-niah_multikey_1.pdf", folder / "needles.pdf")
    table = folder / "table.tex"
    assert call(["table", str(run), "--rows", "policy", "--columns", "budget", "--out", str(table)]) == 0
    command = [sys.executable, "-m", "kvbench", "compare-policies", str(run), "snapkv", "criticalkv", *labels]
    compared = subprocess.run([*command, "--format", "latex"], capture_output=True, text=True, check=True).stdout
    texts = [table.read_text(), compared]
    packages = sorted({name for text in texts for name in re.findall(r"^% (\\usepackage\{.*\})$", text, re.MULTILINE)})
    assert packages
    (folder / "paper.tex").write_text(_PAPER % ("\n".join(packages), texts[1], texts[0]))
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-2000:]
    return folder / "paper.pdf", done.stdout


def test_figures_and_tables_fit_their_columns(paper: tuple[Path, str]) -> None:
    _, log = paper
    too_wide = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\)", log)]
    assert max(too_wide, default=0) < 1
    assert "undefined" not in log


@pytest.mark.skipif(not shutil.which("pdftotext"), reason="there is no pdftotext here")
def test_names_of_the_labels_are_in_the_paper(paper: tuple[Path, str]) -> None:
    text = subprocess.run(["pdftotext", str(paper[0]), "-"], capture_output=True, text=True, check=True).stdout
    assert text.count("SnapKV") >= 3 and text.count("Ours") >= 3
    for part in ("KV cache", "keydiff:window=8", "Holm", "difference"):
        assert part in " ".join(text.split())


@pytest.mark.skipif(not shutil.which("pdffonts"), reason="there is no pdffonts here")
def test_all_fonts_are_embedded_and_none_is_a_bitmap(paper: tuple[Path, str]) -> None:
    """Publishers refuse other files."""
    fonts = subprocess.run(
        ["pdffonts", str(paper[0].parent / "front.pdf")], capture_output=True, text=True, check=True
    ).stdout
    lines = fonts.splitlines()[2:]
    assert lines
    for line in lines:
        assert "Type 3" not in line and " yes " in line
