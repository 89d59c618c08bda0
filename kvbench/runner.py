"""From a grid to results: plan, execute, score. `kvbench.run` and `kvbench.load` live here."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.grid import Cell, Grid
from kvbench.progress import Reporter, Silent, duration
from kvbench.store import RunStore, load_frames

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from kvbench.executors.local import Prompt
    from kvbench.harness.protocol import Benchmark, LoadedTask


@dataclass(frozen=True)
class Run:
    """A run's results.

    Attributes:
        path: Its folder.
        cells: A row per cell, as `cells.parquet` (see docs/results.md).
        samples: A row per response, as `samples.parquet`.
        failed: Cells that have no score, with the reason.
    """

    path: Path
    cells: pd.DataFrame
    samples: pd.DataFrame
    failed: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Job:
    """One task at one length on one model: its prompts and its cells."""

    task: LoadedTask
    prompts: list[Prompt]
    cells: list[Cell]


@dataclass
class Stage:
    """One model and all its jobs."""

    model: str
    device: torch.device
    dtype: torch.dtype
    tokenizer: Any
    jobs: list[Job]


def run(grid: Grid | Mapping[str, Any] | str | Path) -> Run:
    """Run a grid, or go on with it where an earlier call stopped.

    Args:
        grid: A `Grid`, its dictionary, or the path of its YAML file.

    Raises:
        UserError: Something in the grid is unknown or out of range.
    """
    if isinstance(grid, (str, Path)):
        grid = Grid.from_yaml(grid)
    elif not isinstance(grid, Grid):
        grid = Grid.from_dict(grid)
    return execute(grid)


def load(paths: str | Path | Iterable[str | Path]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Read the results of one run or several as the data frames (cells, samples)."""
    return load_frames(paths)


def execute(grid: Grid, *, reporter: Reporter | None = None, fresh: bool = False) -> Run:
    """Carry out a grid.

    Args:
        grid: What to run.
        reporter: Told of the progress.
        fresh: Throw away what an earlier run of the same folder left.

    Raises:
        UserError: Something in the grid is unknown or out of range; nothing was run.
    """
    from kvbench.executors.local import Executor, pending

    reporter = Silent() if reporter is None else reporter
    stages = plan(grid, reporter.message)
    failed: dict[str, str] = {}
    with RunStore(grid.path, fresh=fresh) as store:
        store.save_grid(grid.to_dict())
        left = [
            sum(1 for job in stage.jobs for _ in pending(store, job.prompts, job.cells))
            for stage in stages
        ]
        for stage, count in zip(stages, left, strict=True):
            if not count:
                continue
            with _loaded(stage, grid) as model:
                reporter.start(count, stage.model)
                try:
                    executor = Executor(model, stage.tokenizer, store, reporter, grid.batch_size)
                    for job in stage.jobs:
                        executor.run(job.task, job.prompts, job.cells)
                    failed |= executor.failed
                finally:
                    reporter.stop()
        from kvbench.results import frames

        jobs = [(job.task, job.cells) for stage in stages for job in stage.jobs]
        cells, samples = frames(jobs, store.responses())
        store.write(cells, samples)
    failed |= {str(r.cell): str(r.error) for r in cells.itertuples() if r.status != "ok"}
    return Run(grid.path, cells, samples, failed)


def plan(grid: Grid, message: Callable[[str], None]) -> list[Stage]:
    """Load the tasks and name the cells, without any model weight.

    Args:
        grid: What to run.
        message: Told of tasks that cannot be had here.

    Raises:
        UserError: A policy, task, model or option is unknown or out of range, or a prompt is longer
            than the model's window.
    """
    variants = grid.variants()
    leaves = grid.leaves()
    if not variants:
        raise UserError("nothing to run: no policy is left after --no-full")
    stages = [_stage(grid, name, leaves, message) for name in grid.models]
    if not any(stage.jobs for stage in stages):
        raise UserError("nothing to run: none of the tasks can be had here")
    return stages


def _stage(
    grid: Grid,
    name: str,
    leaves: Sequence[tuple[str, Benchmark]],
    message: Callable[[str], None],
) -> Stage:
    from kvbench.engine.models import load_config, load_tokenizer, pick_device, pick_dtype
    from kvbench.harness.encode import split_encode, tokenizer_hash
    from kvbench.harness.protocol import NeedsHub

    _quiet_libraries()
    if grid.attn not in ("auto", "sdpa"):
        raise UserError(f"--attn {grid.attn}: auto or sdpa would be right")
    config = load_config(name, grid.revision)
    text = config.get_text_config()
    tokenizer = load_tokenizer(name, grid.revision)
    device = pick_device(grid.device)
    dtype = pick_dtype(grid.dtype, device)
    template = grid.chat_template
    if template is None:
        template = tokenizer.chat_template is not None
    elif template and tokenizer.chat_template is None:
        raise UserError(f"model {name} has no chat template; --no-chat-template would be right")
    window = int(getattr(text, "max_position_embeddings", 0) or 0)
    revision = getattr(config, "_commit_hash", None) or _folder_digest(name)
    stage = Stage(name, device, dtype, tokenizer, [])
    for leaf, benchmark in leaves:
        for length in grid.lengths if benchmark.sized else (0,):
            _check_window(name, window, length, leaf)
            try:
                task = _harness(benchmark).load(
                    leaf,
                    length=length,
                    samples=grid.samples,
                    seed=grid.seed,
                    tokenizer=tokenizer,
                    tokenizer_id=name,
                    lexicon=_lexicon(tokenizer),
                    chat_template=template,
                    cache_dir=cache_dir(),
                    benchmark=benchmark,
                )
            except NeedsHub as missing:
                message(f"{leaf} is left out: {missing}")
                continue
            prompts = []
            for request in task.requests:
                head, tail = split_encode(tokenizer, request.context, request.question)
                if not tail:  # the model needs a token to start the answer from
                    head, tail = head[:-1], head[-1:]
                if not head:
                    raise UserError(f"{leaf}, {request.sample_id}: the context is empty")
                total = len(head) + len(tail) + request.max_new_tokens
                _check_window(name, window, total, f"{leaf}, {request.sample_id}")
                prompts.append(_prompt(request, head, tail))
            cells = grid.cells_for(
                model=name,
                model_revision=str(revision),
                task=leaf,
                group=benchmark.name,
                length=task.length,
                dtype=str(dtype).removeprefix("torch."),
                device=device.type,
                attention="sdpa",
                chat_template=tokenizer_hash(tokenizer) if template else "",
                data_hash=task.data_hash,
                task_version=task.version,
            )
            stage.jobs.append(Job(task, prompts, cells))
    return stage


def describe(grid: Grid, message: Callable[[str], None], *, fresh: bool = False) -> list[str]:
    """What `--dry-run` says: cells, samples, what is there already, and an estimate.

    The estimate times the first context that is still to do, with its first cell, on the real
    model.

    Args:
        grid: What would be run.
        message: Told of tasks that cannot be had here.
        fresh: Whether what is there already would be thrown away.

    Returns:
        Lines to print.
    """
    from kvbench.executors.local import pending

    stages = plan(grid, message)
    lines = []
    there = not fresh and (grid.path / "responses.jsonl").exists()
    store = RunStore(grid.path) if there else None
    try:
        for stage in stages:
            cells = sum(len(job.cells) for job in stage.jobs)
            total = sum(len(job.cells) * len(job.prompts) for job in stage.jobs)
            todo = []
            for job in stage.jobs:
                if store is None:
                    todo += [(job, c, p) for c in job.cells for p in job.prompts]
                else:
                    todo += [(job, c, p) for c, p in pending(store, job.prompts, job.cells)]
            tasks = ", ".join(dict.fromkeys(job.task.name for job in stage.jobs))
            lines.append(f"{stage.model}: {cells} cells over {tasks}")
            lines.append(f"  {total} responses, {len(todo)} still to generate")
            if todo:
                lines.append(f"  estimate: {duration(_estimate(stage, grid, todo))}")
    finally:
        if store is not None:
            store.close()
    return [*lines, f"into {grid.path}"]


def _estimate(stage: Stage, grid: Grid, todo: Sequence[tuple[Job, Cell, Prompt]]) -> float:
    """Seconds for what is to do: measured on one context and one full batch of it, scaled up."""
    import tempfile

    from kvbench.executors.local import Executor

    job, _, prompt = todo[len(todo) // 2]
    contexts = {(j.task.name, j.task.length, p.context_ids) for j, _, p in todo}
    tokens = sum(len(ids) for _, _, ids in contexts)
    steps = sum(p.question.max_new_tokens for _, _, p in todo)
    with tempfile.TemporaryDirectory() as folder, _loaded(stage, grid) as model:
        for _ in range(2):  # the first pass warms up
            with RunStore(folder, fresh=True) as scratch:
                executor = Executor(model, stage.tokenizer, scratch, Silent(), grid.batch_size)
                executor.run(job.task, [prompt], job.cells)
                done = scratch.responses()
    prefill = done[0].prefill_s / max(1, len(prompt.context_ids))
    compress = sum(r.compress_s for r in done) / len(done)
    generated = sum(max(1, r.generated_tokens) for r in done)
    decode = sum(r.decode_s for r in done) / generated
    return prefill * tokens + compress * len(todo) + decode * steps


def cache_dir() -> Path:
    """Where generated task data is kept: `$KVBENCH_CACHE`, or `kvbench` in the user's cache."""
    if os.environ.get("KVBENCH_CACHE"):
        return Path(os.environ["KVBENCH_CACHE"])
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvbench"


def _loaded(stage: Stage, grid: Grid) -> Any:
    from contextlib import contextmanager

    from kvbench.engine.models import load_model
    from kvbench.engine.prefix import engine

    @contextmanager
    def loaded() -> Any:
        model = load_model(stage.model, grid.revision, stage.device, stage.dtype)
        with engine(model):
            yield model

    return loaded()


def _prompt(request: Any, head: list[int], tail: list[int]) -> Prompt:
    from kvbench.executors.local import Prompt

    return Prompt(request, tuple(head), tuple(tail))


def _check_window(model: str, window: int, length: int, what: str) -> None:
    if window and length > window:
        raise UserError(
            f"{what}: {length} tokens do not fit into the {window} of model {model}; "
            "nothing is truncated: a smaller --length would be right"
        )


def _harness(benchmark: Benchmark) -> Any:
    if benchmark.harness != "lm_eval":
        raise UserError(f"{benchmark.name}: there is no harness {benchmark.harness!r}; lm_eval is")
    from kvbench.harness.lm_eval import LmEvalHarness

    return LmEvalHarness()


def _lexicon(tokenizer: Any) -> str:
    """The reference model's tokenizer knows only the reference lexicon's words."""
    from kvbench.reference.grammar import VOCABULARY

    vocabulary = tokenizer.get_vocab()
    own = len(vocabulary) == len(VOCABULARY) and all(word in vocabulary for word in VOCABULARY)
    return "reference" if own else "natural"


def _folder_digest(name: str) -> str:
    """Digest of a local model: its config, and size, head and tail of every weight file."""
    from kvbench.engine.models import resolve_model

    folder = Path(resolve_model(name))
    digest = hashlib.sha256()
    if not folder.is_dir():
        return ""
    files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}|{size}|".encode())
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]


def _quiet_libraries() -> None:
    """transformers says much on import that is no user's concern here."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
