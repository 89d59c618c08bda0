"""Do kvbench and kvpress keep the same entries? `python -m benchmarks.kvpress_agreement --help`.

NVIDIA's kvpress (Apache-2.0) implements many of the same methods, written by others. Every press
that it exports has a row in `benchmarks/kvpress_rows.py`, or a reason why it has none. Both get the
same weights (random Llama and Qwen3 with 4 query heads per KV head, and the shipped reference
model) and the same tokens; what each keeps is compared entry by entry. kvpress pins an older
transformers, so it runs in an environment of its own; the two exchange files (JSON, npz).

    python3 -m venv .venv-kvpress && .venv-kvpress/bin/pip install 'torch==2.13.0' 'kvpress==0.5.5'
    python -m benchmarks.kvpress_agreement --kvpress-python .venv-kvpress/bin/python

`benchmarks/kvpress_rows.py` says which policy is which press, and `kvpress_presses.py` with which
settings. What is not obvious there:

- `compression_ratio` is the share REMOVED: it keeps `int(T * (1 - ratio))` entries. Budgets are
  given in tokens here, `ratio = 1 - (b + 1/2) / T`, so that both keep `b` whatever is rounded.
- `SnapKVPress` pools per query head and averages afterwards, which is the same as `snapkv` for
  `pool=avg` (and would not be for `max`).
- In the rows of `DRAWN` kvpress gets what kvbench draws: the noise of `random`, of `cam`'s merging,
  and the Gaussian matrices of the defaults of `compactor`, `leverage` and `curdkv`.
- The row `criticalkv floor` has `alpha_safeguard=0.5, first_stage_ratio=0.25`: heads at their floor
  have no second stage, which is where the release and the paper part.
- In the other rows that project at random neither side does (`sketch=0`; kvpress gets the identity
  for `torch.randn`).
- `KVzipPress` asks in words for the context. With a tokenizer that encodes nothing it replays what
  kvbench replays: every chunk, behind the 8 tokens before it.
- `DMSPress` gets the threshold that lets the budget through, found in a forward without eviction,
  and `SimLayerKVPress` the one that leaves as many layers whole as the budget does.
- Q-filters, statistics, surrogates of KVzap, patterns of DuoAttention and curves of LU-KV are drawn
  at random, and both sides read the same. Those of KVzap are written as NVIDIA publishes them and
  go through `python -m kvbench_policies.gates.convert`.
- While tokens are decoded, both sides get the same ones, whatever the logits are.
- A press that removes entries from the cache is watched by finding the entries that stay among all
  that were ever added, bit by bit; others note `masked_key_indices` on the attention module.

Where kvpress differs by design, so that it is kept out of the comparison:

- The window (and so the last token) is protected by a score of `max + 1`: where it does not fit the
  budget any of its tokens may go. Here the oldest go first. In stage 2 of `CriticalKVPress` that
  score is multiplied by the value's norm as well, so that beyond stage 1's share the window is not
  sure to stay. Budgets here are at least twice the window.
- `CompactorPress` gives its 8 sinks and 4 recent tokens the largest score of the others, and
  `LagKVPress` its sinks and its window 1: where they do not fit, any of them may go.
- `LagKVPress` scores are ranks within partitions, so the best of every partition tie. Of equals the
  more recent stays here; `topk` does not say.
- `StreamingLLMPress` below 5 entries keeps some of the sinks and not the last token. Budgets here
  are at least 5.
- AdaKV's floor is at least one entry a head; `floor(0.2 * b)` here (they differ below `b = 5`).
- The prompt must be longer than the window.
- Layers of `PyramidKVPress`, chunks and thresholds do not sum to a given budget. In rows with
  `counts`, every head here is given as many entries as kvpress gives it.
- Padding and batches are not seen by its scores, so all is compared at B = 1.

A difference is a `tie` where kvpress' own scores, put through kvbench's allocator and selector,
give what kvpress kept while the two scores differ by rounding alone (1e-5 of a head's largest), or
where the entries that differ have equal scores. In rows with a `reason` the press runs twice: as it
is, to say how far sets differ by `design`, and without what the reason says (`kvpress_mended.py`),
and then both sides must keep the same. Where entries are merged, keys and values must be the same,
too. Anything else is `real`, and the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np

from benchmarks.kvpress_cases import artifacts, cases, random_models
from benchmarks.kvpress_compare import KINDS, Cell, cells_of, draws
from benchmarks.kvpress_rows import NOT_RUN, ROWS, Case, Row, compared
from benchmarks.two_sides import KVPRESS, environment

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "from-kvpress.md"
BEGIN, END = (f"<!-- {edge}: kvpress_agreement.py -->\n" for edge in ("begin", "end"))
PLACES = {"w": "w", "h": "w/2", "k": "k", "c": "c", "sinks": "4", "recent": "r", "profile": "FILE"}
"""How the table spells what differs from case to case; all others are folders."""


def line(name: str, case: Case, made: list[tuple[float, Cell]]) -> str:
    """A line of the printed table: one row on one case."""
    columns = [f"{b}: {c.other}/{c.kept}{' ' + c.kind if c.kind else ''}" for b, c in made]
    setting = f"{case['window']}/{case['kernel']}" if ROWS[name].setting else "-"
    worst = max(cell.error for _, cell in made)
    where = f"{name:<28}{case['model']:<11}{len(case['ids']):>4}  {setting:<6}"
    return f"{where} {worst:.0e}   " + "   ".join(columns)


def verdict(row: Row, cells: list[Cell]) -> str:
    """What the table of the docs says of a row."""
    other, kept = sum(c.other for c in cells), sum(c.kept for c in cells)
    said = {
        "tie": "ties",
        "design": f"{row.reason}; with that mended, kvpress keeps the same",
        "real": "for no reason that is known",
    }
    found = [said[kind] for kind in KINDS if any(c.kind == kind for c in cells)]
    if found:
        text = f"{other} of {kept} ({_percent(other / kept)}): {', '.join(found)}"
    else:
        text = f"0 of {kept}" + (f", although {row.reason}" if row.reason else "")
    merged = [c.merged for c in cells if c.merged is not None]
    if merged:
        text += f"; keys and values that stay then differ by {max(merged):.0e} at most"
    moved = [c.moved for c in cells if c.moved is not None]
    if moved:
        text += f"; keys differ from ours at adjacent positions by {max(moved):.0e} at most"
    return text


def _notes(row: Row) -> str:
    """How a cell differs from a prompt that is cut once, at a budget of kvbench's."""
    moment = {
        "question": "moment `question`",
        "decode": "moment `decode`",
        "decode_at_budget": "moment `decode`, from a prompt of the budget's length",
        "turns": "moment `turns`",
        "chunked": "moment `chunked`",
    }.get(row.moment)
    notes = [moment] if moment else []
    if row.counts:
        notes.append("shares as in kvpress")
    return "".join(f", {note}" for note in notes)


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 0.0005 else f"{share:.1%}"


def markdown(done: dict[str, list[Cell]], versions: str, before: str = "") -> str:
    """The table of `docs/from-kvpress.md`; rows that were not run stay as they are in `before`."""
    rows, count = [], 0
    for name, row in ROWS.items():
        here = f"`{row.spelling.format_map(Places())}`{_notes(row)}"
        begin = f"| `{row.press}` | {here} |"
        old = [line for line in before.splitlines() if line.startswith(begin)]
        if name in done:
            rows.append(f"{begin} {len(done[name])} | {verdict(row, done[name])} |")
        elif len(old) == 1:
            rows += old
        else:
            raise SystemExit(f"the page has no row {begin!r}; run {name!r} as well")
        count += int(rows[-1].removeprefix(begin).split("|")[0])
    lines = [
        f"{count} cells, {versions}:",
        "",
        "| press | compared with | cells | kept otherwise |",
        "| --- | --- | --- | --- |",
        *rows,
        *(f"| `{press}` | | | {reason} |" for press, reason in NOT_RUN.items()),
    ]
    return "\n".join(lines) + "\n"


class Places(dict[str, str]):
    """What stands for the settings of a case in the table of the docs."""

    def __missing__(self, name: str) -> str:
        return PLACES.get(name, "FOLDER")


def write(table: str, page: Path) -> None:
    """Put the table between its marks in a page."""
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")


def report(folder: Path, page: Path | None) -> int:
    """Print the table; 1 if a difference is real, or a press of kvpress has no row."""
    theirs = np.load(folder / "kvpress.npz", allow_pickle=False)
    mine = ", ".join(f"{p} {version(p)}" for p in ("kvbench", "transformers", "torch"))
    versions = f"{mine} against {', '.join(theirs['versions'])}"
    print(f"{versions}\n")
    print("Entries kept otherwise of those kept, over all layers and heads, at each budget;")
    print("d(score): largest difference of the scores, relative to the head's largest.\n")
    print(f"{'row':<28}{'model':<11}{'T':>4}  w/k    d(score)  b: different/kept ...")
    done: dict[str, list[Cell]] = {}
    for name, case, made in cells_of(folder, theirs):
        print(line(name, case, made), flush=True)
        done.setdefault(name, []).extend(cell for _, cell in made)
    cells = [cell for row in done.values() for cell in row]
    count = {kind: sum(c.other for c in cells if c.kind == kind) for kind in KINDS}
    print(
        f"\n{len(cells)} cells, {sum(c.kept for c in cells)} entries: {count['tie']} differ by a "
        f"tie, {count['design']} by design, "
        f"{count['real']} for real"
    )
    missing = sorted({*theirs["exported"].tolist()} - compared())
    if missing:
        print(f"kvpress exports presses without a row: {', '.join(missing)}")
    if page is not None:
        before = page.read_text(encoding="utf-8").split(BEGIN)[1]
        write(markdown(done, versions, before), page)
    return int(bool(missing) or any(c.kind == "real" for c in cells))


def main() -> int:
    """Run both sides and compare them."""
    parser = argparse.ArgumentParser(description="Compare what kvbench and kvpress keep.")
    parser.add_argument("--kvpress-python", help="python of an environment with kvpress 0.5")
    parser.add_argument("--only", help="names of the table's first column, with commas")
    parser.add_argument("--write", action="store_true", help="update these rows of docs/from-kvpress.md")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(ROWS)
    unknown = sorted(set(chosen) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    python = environment("benchmarks.kvpress_agreement", KVPRESS, arguments.kvpress_python)
    if python is None:
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = random_models(folder)
        listed = cases(models, artifacts(models, folder), chosen)
        (folder / "cases.json").write_text(json.dumps(listed))
        draws(listed, folder)
        command = [python, "-m", "benchmarks.kvpress_side", name]
        if subprocess.run(command, check=False, cwd=ROOT).returncode:
            return 2
        return report(folder, PAGE if arguments.write else None)


if __name__ == "__main__":
    sys.exit(main())
