"""Do runs that are killed at random moments lose or repeat a response? Their tables must be whole.

    python -m benchmarks.faults [--kills 200] [--ray 50] [--minutes 60]

A grid of two tasks and three policies on the reference model is run once undisturbed. Then it is
run again and again, each time in a new folder, and the running process is killed with SIGKILL at a
random moment: while it starts and plans, while it generates, while it writes. The same command
continues the run, and is killed again, until it ends. With Ray the victim is the driver or one of
the workers, on a Ray of this machine that the drivers connect to.

After every kill, what the journal held must still be there. At the end of a run every response must
be in the journal exactly once and equal that of the undisturbed run, and so must both tables (times
left out). Exit status 1 if anything is lost, repeated or different.

Every run is a process of its own. It is forked from one that has imported kvbench: a kill costs a
second or two, and not the time of the imports. Ray workers import kvbench themselves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.errors import UserError
from kvbench.files import Journal
from kvbench.runs.file_names import RESPONSES
from kvbench.runs.grid import Grid
from kvbench.runs.load import load_frames
from kvbench.runs.runner import execute

GRID = {
    "policy": "snapkv:window=8,random",
    "budget": "24",
    "task": "niah_single_1,niah_single_2",
    "length": 256,
}
"""Two tasks, the full cache and two policies."""

MOMENTS = "context,question"
KEY = ("cell", "sample_id", "question_id", "repeat")
TIMES = {"prefill_s", "compress_s", "decode_s"}


def workers_of(process: int) -> list[int]:
    """Ids of the Ray workers of kvbench among the descendants of a process."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, name = (folder / "stat").read_text(), (folder / "cmdline").read_text()
        except OSError:  # it has just ended
            continue
        parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        names[int(folder.name)] = name

    def below(child: int) -> bool:
        return child == process or (child in parents and below(parents[child]))

    return [pid for pid, name in names.items() if "ray::RemoteWorker" in name and below(pid)]


def journal(out: Path) -> bytes:
    """What the journal of a run holds, a torn last line left out."""
    file = out / RESPONSES
    content = file.read_bytes() if file.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def tables(out: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Both tables of a run without times, in an order that does not depend on its history."""
    cells, samples = load_frames(out)
    cells = cells.drop(columns=[*TIMES]).sort_values("cell", ignore_index=True)
    return cells, samples.sort_values([*KEY], ignore_index=True)


def entries(out: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Key and content, without times, of every line of the journal of a run."""
    with Journal(out / RESPONSES) as lines:
        for entry in lines.entries():
            yield (
                tuple(entry[name] for name in KEY),
                {name: value for name, value in entry.items() if name not in TIMES},
            )


def problems(out: Path, undisturbed: Path) -> list[str]:
    """What is wrong with a finished run; empty if it equals the undisturbed one."""
    found = []
    written = list(entries(out))
    times = Counter(key for key, _ in written)
    expected = dict(entries(undisturbed))
    found += [f"lost: {key}" for key in expected if key not in times]
    found += [f"written {count} times: {key}" for key, count in times.items() if count > 1]
    found += [f"different: {key}" for key, entry in written if expected.get(key) != entry]
    if (out / f"{RESPONSES}.damaged").exists():
        found.append("a line was damaged")
    for name, ours, theirs in zip(("cells", "samples"), tables(out), tables(undisturbed), strict=True):
        if not ours.equals(theirs):
            found.append(f"{name}.parquet differs")
    return found


@dataclass
class Assault:
    """Runs one grid in new folders and kills it.

    Attributes:
        folder: Where the runs go.
        undisturbed: The run to compare with.
        changes: What the grid has besides `GRID`.
        draw: Decides when and who.
        until: When it stops killing, on the clock of `time.monotonic`.
        kills: How often who was killed.
        runs: Runs that have ended, and equal the undisturbed one or not.
        wrong: What was wrong with them.
    """

    folder: Path
    undisturbed: Path
    changes: dict[str, Any]
    draw: random.Random
    until: float
    kills: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    wrong: list[str] = field(default_factory=list)

    def kill(self, count: int) -> None:
        """Run and kill `count` times, or until the time is over; the last run goes to its end."""
        while self._more(count):
            out = self.folder / f"{self.changes.get('executor', 'local')}-{self.runs}"
            while self._run(out, count):
                pass
            self.runs += 1
            found = problems(out, self.undisturbed)
            self.wrong += [f"{out.name}: {problem}" for problem in found]
            kills = self.kills.total()
            print(f"{out.name}: {kills} kills so far, {len(found)} problems", flush=True)
            shutil.rmtree(out)

    def _more(self, count: int) -> bool:
        return self.kills.total() < count and time.monotonic() < self.until

    def _run(self, out: Path, count: int) -> bool:
        """Run the command once; return whether it must be run again."""
        grid = Grid.from_dict(GRID | {"moment": MOMENTS} | self.changes | {"out": str(out)})
        process = CONTEXT.Process(target=run, args=(grid,))
        process.start()
        assert process.pid is not None
        before = journal(out)
        while self._more(count) and self._wait(process, out, len(before)):
            before = journal(out)
            workers = workers_of(os.getpid()) if grid.executor == "ray" else []
            if workers and self.draw.random() < 0.5:
                self._end("worker", self.draw.choice(workers))
                continue  # the run goes on, and is the next victim
            self._end("driver" if grid.executor == "ray" else "run", process.pid)
            break
        process.join()
        if not journal(out).startswith(before):
            self.wrong.append(f"{out.name}: the journal lost lines")
        if process.exitcode not in (0, GAVE_UP, -signal.SIGKILL):
            raise SystemExit(f"{out.name}: exit status {process.exitcode}")
        return process.exitcode != 0

    def _wait(self, process: Any, out: Path, size: int) -> bool:
        """Wait for a random moment; return whether the process is still running."""
        if self.draw.random() < 0.25:
            process.join(self.draw.uniform(0, 2))  # while it starts, plans or loads the model
        else:
            more = self.draw.randrange(15_000)  # bytes of the journal: up to 30 responses
            while process.is_alive() and len(journal(out)) < size + more:
                time.sleep(0.01)
            process.join(self.draw.uniform(0, 0.1))
        return bool(process.is_alive())

    def _end(self, victim: str, process: int) -> None:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:  # a worker that has just ended by itself
            return
        self.kills[victim] += 1


def run(grid: Grid) -> None:
    """Carry out a grid, as the command line does."""
    try:
        execute(grid)
    except UserError as error:
        if "workers in a row" not in str(error):
            raise
        raise SystemExit(GAVE_UP) from None


GAVE_UP = 2
"""Exit status after too many killed Ray workers in a row; the same command continues."""

CONTEXT = multiprocessing.get_context("forkserver")


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="kills in all")
    parser.add_argument("--ray", type=int, default=50, help="how many of them with Ray")
    parser.add_argument("--minutes", type=float, default=60, help="kill no longer than this")
    parser.add_argument("--samples", type=int, default=40, help="per task")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # before the forks: they connect by address
    CONTEXT.set_forkserver_preload(["kvbench.runs.runner"])
    changes = {"samples": given.samples}
    until = time.monotonic() + 60 * given.minutes
    with tempfile.TemporaryDirectory(prefix="kvbench-faults-") as name:
        folder = Path(name)
        undisturbed = folder / "undisturbed"
        execute(Grid.from_dict(GRID | {"moment": MOMENTS} | changes | {"out": str(undisturbed)}))
        expected = len(list(entries(undisturbed)))
        assaults = [Assault(folder, undisturbed, changes, random.Random(given.seed), until)]
        assaults[0].kill(given.kills - given.ray)
        if given.ray:
            with_ray = changes | {"executor": "ray", "ray_address": _cluster(), "workers": 2}
            draw = random.Random(given.seed)
            assaults.append(Assault(folder, undisturbed, with_ray, draw, until))
            assaults[1].kill(given.ray)
    wrong = [problem for assault in assaults for problem in assault.wrong]
    kills = sum((assault.kills for assault in assaults), Counter[str]())
    runs = [assault.runs for assault in assaults]
    print(json.dumps({"kills": kills, "runs": runs, "responses of each": expected}))
    for problem in wrong:
        print(problem)
    print(f"{kills.total()} kills, {sum(runs)} runs to their end, {len(wrong)} problems")
    return 1 if wrong else 0


def _cluster() -> str:
    """Start Ray in this process; the runs connect to its address, so it outlives their kills."""
    import ray  # an optional package

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    started = ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    return str(started.address_info["address"])


if __name__ == "__main__":
    sys.exit(main())
