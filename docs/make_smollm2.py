"""Write the tables of SmolLM2 into docs/smollm2.md: `python docs/make_smollm2.py`.

They come from results/smollm2, results/smollm2-* and results/leaderboard. With `--check` the page is only compared with
the results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

import kvbench
from kvbench.papers.published.results import paper
from kvbench.report.against import differences
from kvbench.report.equal import equal_rows, without_room
from kvbench.report.frames import prepare
from kvbench.report.overall import group_means
from kvbench.tables.text import listed

ROOT = Path(__file__).parents[1]
RUN = ROOT / "results" / "smollm2"
LEADERBOARD = ROOT / "results" / "leaderboard"
FIDELITY = ROOT / "results" / "smollm2-fidelity"
FITTED = ROOT / "results" / "smollm2-fitted"
BYTES = ROOT / "results" / "smollm2-bytes"
DECODE = ROOT / "results" / "smollm2-decode"
DECODE_COUNT = ROOT / "results" / "smollm2-decode-count"
DECODE_MORE = ROOT / "results" / "smollm2-decode-more"
DECODE_84 = ROOT / "results" / "smollm2-decode-84"
DECODE_FLOAT32 = ROOT / "results" / "smollm2-decode-float32"
DECODE_OPEN = ROOT / "results" / "smollm2-decode-open"
PAGE = ROOT / "docs" / "smollm2.md"
BUDGETS = ("0.1", "0.2", "0.3", "0.5")
MARK = "†"
MOMENTS = {"context": "before the question", "question": "after it"}
PAIRS = (
    ("critical_snapkv", "snapkv"),
    ("criticalkv", "adakv"),
    ("critical_headkv", "headkv"),
    ("adakv", "snapkv"),
    ("headkv", "snapkv"),
    ("d2o", "h2o"),
    ("cam", "h2o"),
    ("layer_defensivekv", "defensivekv"),
    ("defensivekv", "snapkv"),
)
"""Each a policy and the one that its paper builds on."""
BUFFER = ":buffer=16"
"""The parameter that all policies of results/smollm2-decode have."""
CLAIMS = (
    ("trimkv", "rkv"),
    ("trimkv", "snapkv"),
    ("trimkv", "h2o"),
    ("trimkv", "streaming_llm"),
    ("dbtrimkv", "trimkv"),
)
"""Each a policy and one that it beats while the answer is generated, say TRIM-KV's and DBTrimKV's papers."""
LEARNED = ("trimkv", "dbtrimkv", "locret", "kvzap:window=16")
HEURISTIC = "keydiff"
"""The learned gates are compared with it."""


def overview(means: pd.DataFrame, notes: Notes) -> Iterator[str]:
    """The mean of every policy, moment and budget; the best of a column is bold.

    Args:
        means: Means over the tasks.
        notes: What must be known of some cells.
    """
    scores = {(r.policy, r.moment, r.budget): 100 * r.score for r in means.itertuples()}
    columns = [(moment, budget) for moment in MOMENTS for budget in BUDGETS]
    best = {c: max(s for (_, *at), s in scores.items() if tuple(at) == c) for c in columns}
    names = {name for name, *_ in scores if name != "full"}
    order = sorted(names, key=lambda n: (-sum(scores.get((n, *c), 0.0) for c in columns), n))
    heads = [f"{MOMENTS[m]}, {b}" if b == BUDGETS[0] else b for m, b in columns]
    yield f"| policy | {' | '.join(heads)} |"
    yield f"| --- |{' --: |' * len(columns)}"
    for name in order:
        cells = []
        for column in columns:
            score = scores.get((name, *column))
            text = "–" if score is None else f"{score:.0f}"
            text += MARK * ((name, *column) in notes.no_room)
            cells.append(f"**{text}**" if score == best[column] else text)
        yield f"| `{name}` | {' | '.join(cells)} |"
    yield ""
    yield (f"{MARK} Sinks and windows of a fixed size fill the budget, so nothing else decides what is kept.")
    for alike, places in notes.equal.items():
        where: dict[str, list[str]] = {}
        for moment, budget in places:
            where.setdefault(MOMENTS[moment], []).append(budget)
        said = " and ".join(f"{moment} at {', '.join(at)}" for moment, at in where.items())
        yield f"{listed([f'`{name}`' for name in alike])} gave the same responses {said}."


@dataclass(frozen=True)
class Notes:
    """What must be known of some cells of the table.

    Attributes:
        no_room: Policy, moment and budget, where sinks and windows fill the budget.
        equal: Policies whose responses are the same, with the moments and budgets.
    """

    no_room: set[tuple[str, str, str]]
    equal: dict[tuple[str, ...], list[tuple[str, str]]]

    @classmethod
    def of(cls, cells: pd.DataFrame, samples: pd.DataFrame) -> Notes:
        """The notes on a run."""
        results = prepare(cells, samples)
        equal = {n: [(p.moment, p.budget) for p in at] for n, at in equal_rows(results).items()}
        found = without_room(results).items()
        return cls({(name, p.moment, p.budget) for (name,), at in found for p in at}, equal)


def precise(means: pd.DataFrame, moment: str) -> Iterator[str]:
    """Means of one moment with their intervals."""
    part = means[means["moment"] == moment]
    yield f"| policy | {' | '.join(BUDGETS)} |"
    yield f"| --- |{' --: |' * len(BUDGETS)}"
    for name, rows in part.groupby("policy"):
        found = {r.budget: r for r in rows.itertuples()}
        cells = [ranged(r.score, r.score_lo, r.score_hi) if (r := found.get(b)) else "–" for b in BUDGETS]
        yield f"| `{name}` | {' | '.join(cells)} |"


def pairs(cells: pd.DataFrame, samples: pd.DataFrame) -> Iterator[str]:
    """What a policy gains over the one it builds on, paired by question."""
    yield f"| moment | policy | against | {' | '.join(BUDGETS)} | all four |"
    yield f"| --- | --- | --- |{' --: |' * (len(BUDGETS) + 1)}"
    run = set(cells["policy"])
    wanted = [p for p in PAIRS if set(p) <= run]
    wanted += [(name, HEURISTIC) for name in LEARNED if {name, HEURISTIC} <= run]
    together = averaged(cells, samples)
    widths = []
    for moment, words in MOMENTS.items():
        for policy, base in wanted:
            found = {r.budget: r for r in against(cells, samples, policy, base, moment)}
            (whole,) = against(*together, policy, base, moment)
            said = [ranged(r.diff, r.diff_lo, r.diff_hi, signed=True) if (r := found.get(b)) else "–" for b in BUDGETS]
            said.append(ranged(whole.diff, whole.diff_lo, whole.diff_hi, signed=True))
            widths.append(50 * (whole.diff_hi - whole.diff_lo))
            yield f"| {words} | `{policy}` | `{base}` | {' | '.join(said)} |"
    yield ""
    yield (
        f"Intervals of the mean over all four budgets reach {min(widths):.1f} to "
        f"{max(widths):.1f} points to each side, half of them at most {median(widths):.1f}."
    )


def against(cells: pd.DataFrame, samples: pd.DataFrame, policy: str, base: str, moment: str) -> Iterator[Any]:
    """The differences of one policy from another at one moment, a row for every budget."""
    part = cells[cells["policy"].isin([policy, base]) & (cells["moment"] == moment)]
    return differences(part, samples, base).itertuples()


def averaged(cells: pd.DataFrame, samples: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The same run as if every policy had one budget: a question's score is the mean over all."""
    place = ["policy", "task", "moment"]
    cells = cells[cells["budget"].isin(BUDGETS)]
    into = cells.groupby(place)["cell"].first().rename("into")
    samples = samples[samples["cell"].isin(cells["cell"])].merge(into, on=place)
    scores = samples.groupby(["into", "sample_id"])["score"].transform("mean")
    samples = samples.assign(score=scores)[samples["cell"] == samples["into"]]
    cells = cells[cells["cell"].isin(into)].assign(budget="all")
    means = samples.groupby("cell")["score"].mean()
    return cells.assign(score=cells["cell"].map(means)), samples


def ranged(mean: float, low: float, high: float, signed: bool = False) -> str:
    """A number in points with its interval; it is bold if the interval of a difference omits 0."""
    form = "+.0f" if signed else ".0f"
    middle = round(100 * mean) + 0.0  # + 0.0: no negative zero, which a bound may have
    text = f"{middle:{form}} [{100 * low:{form}}, {100 * high:{form}}]".replace("-", "−")
    return f"**{text}**" if signed and (low > 0 or high < 0) else text


def sizes(cells: pd.DataFrame) -> str:
    """What was asked, in a sentence."""
    full = cells[cells["policy"] == "full"]
    count = {int(n) for n in cells["samples"]}
    each = f"{min(count)}" if len(count) == 1 else f"{min(count)} to {max(count)}"
    tasks = ", ".join(f"`{t}`" for t in full["task"])
    return (
        f"Tasks: {tasks}, at {full['length'].iloc[0]} tokens in {full['dtype'].iloc[0]}, with "
        f"{each} questions each; the full cache has "
        f"{100 * full['score'].mean():.0f} points."
    )


def leaderboard() -> Iterator[str]:
    """Means of our run beside those of kvpress' leaderboard, best ones there first."""
    means = {(r.policy, r.budget): r.score for r in group_means(*kvbench.load(LEADERBOARD)).itertuples()}
    printed: dict[tuple[str, str], dict[str, str]] = {}
    for f in paper("kvpress").table("1").figures:
        if f.policy != "full":
            printed.setdefault((f.method, f.policy), {})[f.kept] = f.value
    budgets = sorted({budget for _, budget in means} - {"full"}, key=float)
    yield f"| press | policy | {' | '.join(budgets)} |"
    yield f"| --- | --- |{' --: |' * len(budgets)}"
    for (method, policy), theirs in printed.items():
        cells = [f"{100 * means[policy, b]:.0f} / {theirs.get(b, '–')}" for b in budgets]
        yield f"| {method} | `{policy}` | {' | '.join(cells)} |"


def closeness() -> Iterator[str]:
    """Distance from the full cache before the question, and points, by policy."""
    cells, _ = kvbench.load(FIDELITY)
    close = cells[cells["policy"] != "full"].groupby(["policy", "budget"])[["kl", "agreement", "score"]].mean()
    budgets = sorted(set(close.index.get_level_values("budget")))
    heads = " | ".join(f"{b}: KL, nats | same top token | points" for b in budgets)
    yield f"| policy | {heads} |"
    yield f"| --- |{' --: |' * (3 * len(budgets))}"
    for name in close.xs(budgets[0], level="budget")["kl"].sort_values().index:
        row = []
        for budget in budgets:
            kl, agreement, score = close.loc[(name, budget)]
            row += [f"{kl:.2f}", f"{agreement:.0%}", f"{100 * score:.0f}"]
        yield f"| `{name}` | {' | '.join(row)} |"


def over_bytes() -> Iterator[str]:
    """Means over the bytes that are held, the largest first."""
    yield "| policy | budget | live bytes | allocated | points |"
    yield "| --- | --: | --: | --: | --: |"
    means = group_means(*kvbench.load(BYTES))
    for kind in ("live", "allocated"):
        means[kind] = 100 * means[f"kv_bytes_{kind}"] / means["kv_bytes_full"]
    for r in means.sort_values("live", ascending=False).itertuples():
        points = ranged(r.score, r.score_lo, r.score_hi)
        yield f"| `{r.policy}` | {r.budget} | {r.live:.1f}% | {r.allocated:.1f}% | {points} |"


def decoded() -> Iterator[str]:
    """Scores of eviction while answers are generated, by task."""
    cells, _ = kvbench.load(DECODE)
    budgets = sorted(set(cells["budget"]) - {"full"}, key=int)
    tasks = sorted(set(cells["task"]))
    full = {r.task: r for r in cells[cells["policy"] == "full"].itertuples()}
    found = {(r.policy, r.task, r.budget): r for r in cells.itertuples()}
    means = cells[cells["policy"] != "full"].groupby("policy")["score"].mean().sort_values(ascending=False)
    yield f"| policy | {' | '.join(f'`{t}`, {b}' if b == budgets[0] else b for t in tasks for b in budgets)} |"
    yield f"| --- |{' --: |' * (len(tasks) * len(budgets))}"
    for name in means.index:
        points = [f"{100 * found[name, t, b].score:.0f}" for t in tasks for b in budgets]
        yield f"| `{name.removesuffix(BUFFER)}` | {' | '.join(points)} |"
    ranges = [f"`{t}` {ranged(r.score, r.score_lo, r.score_hi)}" for t, r in full.items()]
    yield ""
    yield f"The full cache, with {int(cells['samples'].min())} questions for each task: {listed(ranges)}."


def counted() -> Iterator[str]:
    """Scores of counting while entries are evicted, and what the papers claim, paired by question."""
    cells, samples = kvbench.load(DECODE_COUNT)
    more, _ = kvbench.load(DECODE_MORE)
    budgets = sorted(set(cells["budget"]) - {"full"}, key=int)
    yield from by_budget(pd.concat([cells, more[more["policy"] != "full"]]), budgets)
    yield ""
    yield f"| policy | against | {' | '.join(budgets)} |"
    yield f"| --- | --- |{' --: |' * len(budgets)}"
    for policy, base in CLAIMS:
        rows = {r.budget: r for r in against(cells, samples, policy + BUFFER, base + BUFFER, "decode")}
        said = [ranged(rows[b].diff, rows[b].diff_lo, rows[b].diff_hi, signed=True) for b in budgets]
        yield f"| `{policy}` | `{base}` | {' | '.join(said)} |"


def counted_by_others() -> Iterator[str]:
    """The same for the other policies."""
    every = pd.DataFrame()
    for run in (DECODE_84, DECODE_FLOAT32):  # a policy counts in the first run that has it
        cells, _ = kvbench.load(run)
        every = pd.concat([every, cells if every.empty else cells[~cells["policy"].isin(every["policy"])]])
    yield from by_budget(every, sorted(set(every["budget"]) - {"full"}, key=int))


def by_budget(cells: pd.DataFrame, budgets: list[str]) -> Iterator[str]:
    """Scores of every policy, the highest mean first, and of the full cache."""
    found = {(r.policy, r.budget): r for r in cells.itertuples()}
    means = cells[cells["policy"] != "full"].groupby("policy")["score"].mean().sort_values(ascending=False)
    yield f"| policy | {' | '.join(budgets)} |"
    yield f"| --- |{' --: |' * len(budgets)}"
    for name in means.index:
        rows = [found[name, budget] for budget in budgets]
        points = [ranged(r.score, r.score_lo, r.score_hi) for r in rows]
        yield f"| `{name.removesuffix(BUFFER)}` | {' | '.join(points)} |"
    full = found["full", "full"]
    yield ""
    yield f"The full cache, on {int(full.samples)} questions: {ranged(full.score, full.score_lo, full.score_hi)}."


def decoded_texts() -> Iterator[str]:
    """Distance from the full cache while free text is generated, the nearest policies at the third budget first."""
    cells, _ = kvbench.load(DECODE_OPEN)
    close = cells[cells["policy"] != "full"].set_index(["policy", "budget"])
    budgets = sorted(set(close.index.get_level_values("budget")), key=int)
    yield f"| policy | KL, nats: {' | '.join(budgets)} | same top token: {' | '.join(budgets)} |"
    yield f"| --- |{' --: |' * (2 * len(budgets))}"
    for name in close.xs(budgets[2], level="budget")["kl"].sort_values().index:
        distances = [f"{close.loc[(name, budget), 'kl']:.2f}" for budget in budgets]
        agreement = [f"{close.loc[(name, budget), 'agreement']:.0%}" for budget in budgets]
        yield f"| `{name.removesuffix(BUFFER)}` | {' | '.join(distances + agreement)} |"


def blocks() -> dict[str, str]:
    """Every generated block by its name."""
    cells, samples = kvbench.load(RUN)
    cells, samples = cells[cells["status"] == "ok"], samples[samples["score"].notna()]
    means: Any = group_means(cells, samples)
    notes = Notes.of(cells, samples)
    fitted, answers = kvbench.load(FITTED)
    made = {
        "sizes": [sizes(cells)],
        "overview": overview(means, notes),
        "context": precise(means, "context"),
        "question": precise(means, "question"),
        "pairs": pairs(cells, samples),
        "leaderboard": leaderboard(),
        "fitted sizes": [sizes(fitted)],
        "fitted": overview(group_means(fitted, answers), Notes.of(fitted, answers)),
        "fidelity": closeness(),
        "bytes": over_bytes(),
        "decode": decoded(),
        "decode count": counted(),
        "decode others": counted_by_others(),
        "decode open": decoded_texts(),
    }
    return {name: "\n".join(lines) for name, lines in made.items()}


def filled(text: str, made: dict[str, str]) -> str:
    """A page with every block between its two marks written anew."""
    for name, block in made.items():
        begin, end = (f"<!-- {edge}: make_smollm2.py {name} -->\n" for edge in ("begin", "end"))
        before, mark, rest = text.partition(begin)
        if mark:
            text = f"{before}{begin}\n{block}\n\n{end}{rest.partition(end)[2]}"
    return text


def main(arguments: list[str]) -> int:
    """Write the page, or check that it is up to date."""
    old = PAGE.read_text(encoding="utf-8")
    new = filled(old, blocks())
    if "--check" in arguments and new != old:
        print(f"{PAGE.name} is out of date; run python docs/make_smollm2.py")
        return 1
    if new != old:
        PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
