"""The page of `benchmarks/gpu.py`: which kernels pay, tables, figures and what is missing."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from os.path import relpath
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.kernels import OPS
from kvbench.analysis.speed.figures import draw_bench
from kvbench.analysis.speed.ratios import bench_tables, summarize
from kvbench.analysis.speed.timing import SettingTiming
from kvbench.files import write_whole
from kvbench.progress import duration
from kvbench.tables.numbers import NumberFormat, size
from kvbench.tables.outputs import markdown
from kvbench.tables.plot_style import PAGE, lay_out_figure, plot_style, save
from kvbench.tables.table import Column, Name, Table, TableCell, TableRow
from kvbench.tables.text import code, counted, md

DOCS = Path(__file__).parents[1] / "docs/performance.md"
PAYS = 1.2
"""Least speed-up over the fastest way of torch for which a kernel is worth keeping."""

Row = dict[str, Any]


@dataclass(frozen=True)
class PartResult:
    """What a part measured.

    Attributes:
        rows: Its rows; see the functions of `benchmarks/gpu.py`.
        seconds: How long it took.
        problem: Why it ended early, or "".
    """

    rows: list[Row]
    seconds: float
    problem: str

    @property
    def summary(self) -> str:
        """What there is, in one line."""
        return f"{counted(len(self.rows), 'row')} in {duration(self.seconds)}" + f"; {self.problem}" * bool(
            self.problem
        )


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel pays.

    Attributes:
        kernel: Its name.
        agrees: Whether it agrees with its oracle; None if they were not compared.
        speedups: Time of the fastest way of torch as a multiple of the kernel's, per case and part.
        alone: Cases that no way of torch has memory for.
        is_dry: Whether times say nothing.
    """

    kernel: str
    agrees: bool | None
    speedups: list[float]
    alone: int
    is_dry: bool

    @property
    def mean(self) -> float:
        """Geometric mean of the speed-ups; NaN if there is none."""
        return math.exp(statistics.fmean(map(math.log, self.speedups))) if self.speedups else math.nan

    @property
    def text(self) -> str:
        """The verdict in words."""
        if self.agrees is False:
            return "wrong"
        if not self.speedups:
            return "not measured"
        if self.is_dry:
            return "dry run"
        return "pays" if self.mean >= PAYS else "does not pay"


@dataclass
class Results:
    """Everything that was measured so far.

    Attributes:
        facts: Names and versions of device and software.
        is_dry: Whether sizes were tiny.
        parts: The finished parts, by name.
    """

    facts: Row
    is_dry: bool
    parts: dict[str, PartResult] = field(default_factory=dict)

    def add(self, name: str, rows: list[Row], seconds: float, problem: str) -> None:
        """Store a finished part."""
        self.parts[name] = PartResult(rows, seconds, problem)

    def rows(self, part: str, key: str) -> list[Row]:
        """Return the rows that have a key, of all parts whose name begins so."""
        return [
            row for name, result in self.parts.items() if name.startswith(part) for row in result.rows if key in row
        ]

    @property
    def timed(self) -> dict[tuple[str, str, str], dict[str, Row]]:
        """Timed rows by way, for every kernel, case and part of the computation."""
        timed: dict[tuple[str, str, str], dict[str, Row]] = {}
        for row in self.rows("kernel-", key="part"):
            timed.setdefault((row["op"], row["case"], row["part"]), {})[row["way"]] = row
        return timed

    @property
    def verdicts(self) -> list[Verdict]:
        """Whether each kernel pays."""
        verdicts = []
        for kernel in OPS:
            complaints = [
                row["complaint"]
                for row in self.rows("kernel-", key="complaint")
                if row["op"] == kernel and row["way"] == "kernel"
            ]
            speedups: list[float] = []
            alone = 0
            for (op, _, _), ways in self.timed.items():
                if op == kernel and not ways.get("kernel", {"error": "none"})["error"]:
                    fastest = fastest_of_torch(ways)
                    alone += fastest is None
                    speedups += [] if fastest is None else [fastest["ms"] / ways["kernel"]["ms"]]
            verdicts.append(Verdict(kernel, not any(complaints) if complaints else None, speedups, alone, self.is_dry))
        return verdicts

    @property
    def problems(self) -> list[str]:
        """What is wrong, in Markdown."""
        problems = [f"Part {code(name)}: {md(part.problem)}." for name, part in self.parts.items() if part.problem]
        problems += [
            f"{code(row['test'])}: {md(row['message'])}"
            for row in self.rows("oracles", key="test")
            if row["outcome"] == "failed"
        ]
        problems += [
            f"{code(row['case'])}, {md(row['way'])}: {md(row['complaint'])}."
            for row in self.rows("kernel-", key="complaint")
            if row["complaint"] and row["way"] == "kernel"
        ]
        problems += [
            f"{code(row['case'])}, {row['part']}, kernel: {md(row['error'])}."
            for row in self.rows("kernel-", key="part")
            if row["error"] and row["way"] == "kernel"
        ]
        problems += [
            f"{code(row['policy'])} {row['budget']} on {row['model']} at context {row['context']}: {md(row['error'])}."
            for row in self.rows("", key="batch_setting")
            if row["error"]
        ]
        unequal = [row for row in self.rows("responses", key="equal") if not (row["equal"] and row["held_equal"])]
        return [*problems, *[f"Not all responses equal the CPU's: {len(unequal)} differ."] * bool(unequal)]


def fastest_of_torch(ways: dict[str, Row]) -> Row | None:
    """Return the row of the fastest way without a kernel; None if none has enough memory."""
    rows = [row for way, row in ways.items() if way != "kernel" and not row["error"]]
    return min(rows, key=lambda row: float(row["ms"]), default=None)


def write_page(results: Results, folder: Path) -> Path:
    """Write the page beside a folder with its figures and `results.json`; return the page's path."""
    content = {"facts": results.facts, "parts": {name: asdict(part) for name, part in results.parts.items()}}
    write_whole(folder / "results.json", json.dumps(content, indent=1).encode())
    lines = [*_head(results, folder), *_kernels(results, folder), *_oracles(results)]
    for name in results.parts:
        if name.startswith("grid-"):
            lines += _grid(results, name, folder)
    lines += [*_responses(results), *_missing(results)]
    page = folder.with_name(f"{folder.name}.md")
    write_whole(page, ("\n\n".join(lines) + "\n").encode())
    return page


def _head(results: Results, folder: Path) -> Iterator[str]:
    facts = results.facts
    yield f"# {md(facts['device'])}"
    options = " --dry-run" * results.is_dry
    memory = (
        f", {size(facts['memory'])}, capability {facts['capability']}, CUDA {facts['cuda']}"
        if "memory" in facts
        else ""
    )
    yield (
        f"Measured by `python -m benchmarks.gpu{options}`{memory}; torch {code(facts['torch'])}, triton "
        f"{code(facts['triton'])}. [results.json]({folder.name}/results.json) has all numbers."
    )
    if results.is_dry:
        yield (
            "**This was a dry run with tiny sizes.** On a CPU, kernels run in Triton's interpreter. It shows that all "
            "parts work; its times say nothing about a GPU."
        )


def _kernels(results: Results, folder: Path) -> Iterator[str]:
    yield "## Which kernels pay"
    by_text: dict[str, list[str]] = {}
    for verdict in results.verdicts:
        by_text.setdefault(verdict.text, []).append(code(verdict.kernel))
    sentences = [f"**{text.capitalize()}:** {', '.join(kernels)}." for text, kernels in sorted(by_text.items())]
    yield (
        f"A kernel pays if it is at least {PAYS} times as fast as the fastest way of torch, in the geometric mean over "
        f"its cases. {' '.join(sentences)}"
    )
    columns = (
        Column("kernel"),
        Column("agrees with its oracle"),
        Column("mean", NumberFormat.TIMES, group="speed-up over torch"),
        Column("smallest", NumberFormat.TIMES, group="speed-up over torch"),
        Column("largest", NumberFormat.TIMES, group="speed-up over torch"),
        Column("cases", NumberFormat.COUNT),
        Column("only the kernel fits", NumberFormat.COUNT),
        Column("verdict"),
    )
    rows = [
        TableRow(
            (
                Name(verdict.kernel),
                {True: "yes", False: "no", None: None}[verdict.agrees],
                verdict.mean if verdict.speedups else None,
                min(verdict.speedups, default=None),
                max(verdict.speedups, default=None),
                len(verdict.speedups),
                verdict.alone,
                verdict.text,
            )
        )
        for verdict in results.verdicts
    ]
    yield markdown(Table("", columns, tuple(rows)))
    timed = results.timed
    if not timed:
        return
    if any(verdict.speedups for verdict in results.verdicts):
        _draw_speedups(results, folder)
        yield f"![Speed-up of every kernel over the fastest way of torch]({folder.name}/kernels.png)"
    yield "## Times of kernels"
    yield (
        "Medians with a cold second-level cache. The bound is the largest of flops, bytes and exponentials over the "
        f"rates of an H100 SXM ([performance.md]({relpath(DOCS, folder.parent)}#what-a-gpu-could-do-at-best))."
    )
    for op, keys in groupby(timed, key=lambda key: key[0]):
        yield markdown(_times(op, {key: timed[key] for key in keys}))


def _times(op: str, timed: dict[tuple[str, str, str], dict[str, Row]]) -> Table:
    """Return the table of one kernel."""
    ways = list(dict.fromkeys(way for by_way in timed.values() for way in by_way))
    columns = [Column("case", merged=True), Column("part")]
    columns += [Column(way, NumberFormat.NUMBER, group="ms") for way in ways]
    columns += [Column("bound", NumberFormat.NUMBER, group="ms")]
    has_memory = any(row.get("peak_bytes") is not None for by_way in timed.values() for row in by_way.values())
    columns += [Column(way, NumberFormat.BYTES, group="working memory") for way in ways if has_memory]
    rows = []
    for (_, case, part), by_way in timed.items():
        cells: list[TableCell] = [case.removeprefix(f"{op} "), part]
        cells += [(by_way[way]["error"] or by_way[way]["ms"]) if way in by_way else None for way in ways]
        cells += [next((row["roofline_ms"] for row in by_way.values() if not row["error"]), None)]
        cells += [by_way[way].get("peak_bytes") if way in by_way else None for way in ways if has_memory]
        rows.append(TableRow(tuple(cells)))
    return Table(Name(op), tuple(columns), tuple(rows))


def _draw_speedups(results: Results, folder: Path) -> None:
    """Draw a point per case: the speed-up of its kernel over the fastest way of torch."""
    points: list[tuple[str, float]] = []
    for (_, case, part), ways in results.timed.items():
        fastest = fastest_of_torch(ways)
        if fastest is not None and not ways.get("kernel", {"error": "none"})["error"]:
            points.append((f"{case}, {part}", fastest["ms"] / ways["kernel"]["ms"]))
    with plot_style():
        layout = lay_out_figure(
            1,
            1,
            title=f"{results.facts['device']}: speed-up of kernels over the fastest way of torch",
            width=PAGE,
            panel_height=0.17 * len(points) + 0.1,
            x_label=f"times as fast; the dashed line is at {PAYS}",
            y_label="",
            left_margin=3.0,
        )
        axes = layout.axes[0, 0]
        axes.plot([speedup for _, speedup in points], range(len(points)), "o", color="#0072B2")
        axes.axvline(PAYS, color="#777777", ls="--", lw=0.9)
        axes.set_xscale("log")
        axes.set_xlim(
            min(0.5, *(speedup / 1.5 for _, speedup in points)), max(4.0, *(1.5 * speedup for _, speedup in points))
        )
        axes.set_ylim(len(points) - 0.5, -0.5)
        axes.set_yticks(range(len(points)), labels=[name for name, _ in points])
        axes.grid(axis="y", lw=0.3, color="#dddddd")
        axes.xaxis.set_major_formatter(lambda speedup, _: f"{speedup:g}×")
        axes.xaxis.set_minor_formatter(lambda *_: "")
        save(layout.figure, folder / "kernels")


def _oracles(results: Results) -> Iterator[str]:
    tests = results.rows("oracles", key="test")
    planned = sum(row["planned"] for row in results.rows("oracles", key="planned"))
    if not planned:
        return
    passed, failed, skipped = (
        sum(row["outcome"] == outcome for row in tests) for outcome in ("passed", "failed", "skipped")
    )
    yield "## Tests of the kernels"
    yield (
        f"Of {counted(planned, 'test')} that compare kernels with oracles in float64 (padding, groups of query heads, "
        f"odd lengths, head dimensions), {passed} passed, {failed} failed, {skipped} were skipped"
        f", and {planned - len(tests)} did not run in the time."
    )


def _grid(results: Results, name: str, folder: Path) -> Iterator[str]:
    rows = results.rows(name, key="batch_setting")
    if not rows:
        return
    measurements = {column.name: float for column in fields(SettingTiming) if column.name != "error"}
    frame = pd.DataFrame(rows).astype(measurements)  # null in every row, where all settings failed
    yield f"## {md(rows[0]['model'])}, random weights, {rows[0]['dtype']}"
    yield (
        "Prompts of random tokens; the first token includes prefill and compression, and peak memory includes the "
        "weights. Each setting is measured once, after a warm-up of its policy."
    )
    summary = summarize(frame)
    yield from (markdown(table) for table in bench_tables(summary))
    for path in draw_bench(summary, _made(folder / name)):
        if path.suffix == ".png":
            yield f"![{md(rows[0]['model'])}]({folder.name}/{name}/{path.name})"


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _responses(results: Results) -> Iterator[str]:
    rows = results.rows("responses", key="equal")
    if not rows:
        return
    yield "## Responses"
    yield (
        "The models that ship with kvbench, in float32: how many responses and numbers of held entries equal those of "
        "torch's code on this machine's CPU."
    )
    columns = ["model", "task", "policy", "budget", "moment"]
    counts = pd.DataFrame(rows).groupby(columns, sort=False)[["equal", "held_equal"]].agg(["size", "sum"])
    table_rows = [
        TableRow(
            (*map(str, key), int(count["equal", "size"]), int(count["equal", "sum"]), int(count["held_equal", "sum"]))
        )
        for key, count in counts.iterrows()
        if isinstance(key, tuple)
    ]
    numbers = [Column(title, NumberFormat.COUNT) for title in ("responses", "equal", "entries equal")]
    yield markdown(Table("", (*(Column(column, merged=True) for column in columns), *numbers), tuple(table_rows)))


def _missing(results: Results) -> Iterator[str]:
    yield from _listed("Problems", results.problems)
    left_out = [md(row["left_out"]) for row in results.rows("", key="left_out")]
    yield from _listed("Left out", left_out)


def _listed(title: str, items: Sequence[str]) -> Iterator[str]:
    if items:
        yield f"## {title}"
        yield "\n".join(f"- {item}" for item in items)
