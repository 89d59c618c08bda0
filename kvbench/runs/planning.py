"""From a grid to jobs: tasks loaded, prompts tokenised, cells named, without any model weight."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import quantization
from kvbench.decoding import Thinking
from kvbench.errors import UserError
from kvbench.files import cache_dir
from kvbench.judge.choosing import Judges
from kvbench.moments import split_moment
from kvbench.runs.cell import Cell
from kvbench.runs.grid import Grid
from kvbench.runs.prompts import Window, prompts_of

if TYPE_CHECKING:
    import torch

    from kvbench.benchmark import Benchmark
    from kvbench.harness.protocol import LoadedTask
    from kvbench.runs.answers import Prompt

_MODEL_FILES = frozenset({".json", ".safetensors", ".jinja", ".model", ".txt"})


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


def plan(grid: Grid, message: Callable[[str], None]) -> list[Stage]:
    """Load the tasks and name the cells, without any model weight.

    Args:
        grid: What to run.
        message: Told of tasks that cannot be had here.

    Raises:
        UserError: A policy, task, model or option is unknown or out of range, or a prompt is longer
            than the model's window.
    """
    with _importing():
        variants = grid.variants()
    leaves = grid.leaves()
    if not variants:
        raise UserError("nothing to run: no policy is left after --no-full")
    judges = Judges(grid.judge, message)
    stages = [_stage(grid, name, leaves, judges, message) for name in grid.models]
    if not any(stage.jobs for stage in stages):
        raise UserError("nothing to run: none of the tasks can be had here")
    return stages


def _stage(
    grid: Grid,
    name: str,
    leaves: Sequence[tuple[str, Benchmark]],
    judges: Judges,
    message: Callable[[str], None],
) -> Stage:
    with _importing():
        _quiet_libraries()
        import datasets  # noqa: F401
        import lm_eval.tasks  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

        from kvbench.engine.models import (
            load_config,
            load_tokenizer,
            pick_device,
            pick_dtype,
            resolve_model,
        )
        from kvbench.errors import LeftOut
        from kvbench.harness.chat import check_thinking
        from kvbench.harness.encode import tokenizer_hash

    if grid.attn not in ("auto", "sdpa"):
        raise UserError(f"--attn {grid.attn}: auto or sdpa would be right")
    config = load_config(name, grid.revision)
    text = config.get_text_config()
    tokenizer = load_tokenizer(name, grid.revision)
    device = pick_device(grid.device, grid.device_map)
    quantised = quantization.check(name, config, grid.quantization, grid.device_map)
    dtype = pick_dtype(grid.dtype, device)
    template = grid.chat_template
    if template is None:
        template = tokenizer.chat_template is not None
    elif template and tokenizer.chat_template is None:
        raise UserError(f"model {name} has no chat template; --no-chat-template would be right")
    window = Window(name, int(getattr(text, "max_position_embeddings", 0) or 0))
    settings = grid.generation
    unasked = replace(settings, thinking=None)  # where no template is told of it
    if settings.thinking is not None:
        check_thinking(tokenizer, name, template)
    revision = model_digest(name) or str(getattr(config, "_commit_hash", None) or "")
    if grid.revision is not None and Path(resolve_model(name)).is_dir():
        raise UserError(
            f"--revision {grid.revision}: model {name} is a folder and has no revisions"
        )
    thinks = Thinking.of(tokenizer) is not None
    stage = Stage(name, device, dtype, tokenizer, [])
    without = _without(grid, name, message)
    for leaf, benchmark in leaves:
        plain = leaf in benchmark.plain
        left_out: set[str] = set()
        for length in grid.lengths if benchmark.sized else (0,):
            window.check(length, leaf)
            try:
                judge = judges.of(benchmark)
                task = _harness(benchmark).load(
                    leaf,
                    length=length,
                    samples=grid.samples,
                    seed=grid.seed,
                    tokenizer=tokenizer,
                    tokenizer_id=name,
                    lexicon=_lexicon(tokenizer),
                    chat_template=template,
                    thinking=settings.thinking,
                    cache_dir=cache_dir(),
                    benchmark=benchmark,
                )
            except LeftOut as missing:
                if str(missing) not in left_out:  # once for all lengths
                    message(f"{leaf} is left out: {missing}")
                left_out.add(str(missing))
                continue
            task.judge = judge
            judges.announce(benchmark)
            if "turns" in grid.moments and not all(r.dialogue for r in task.requests):
                raise UserError(
                    f"{leaf} has no turns: moment turns is for dialogues, as --task dialogue"
                )
            task.requests = settings.applied(task.requests, message)
            prompts = prompts_of(task, tokenizer, window, grid.truncate, message)
            if "turns" in grid.moments and task.truncated:
                raise UserError(
                    f"{leaf}: a dialogue that is held live is never truncated: another "
                    "--moment, or dialogues that fit, would be right"
                )
            if "decode" in grid.moments:
                _say_buffers(grid, leaf, max(p.limit for p in prompts), message)
            for moment in grid.moments:
                size = split_moment(moment)[1]
                longest = max(len(p.context_ids) + len(p.question_ids) for p in prompts)
                if size and longest <= size:
                    message(
                        f"{leaf}: no prompt is longer than a chunk of {size} tokens: cut once, "
                        f"at its end; --moment chunked:{max(1, longest // 4)} would cut it often"
                    )
            cells = grid.cells_for(
                model=name,
                model_revision=revision,
                task=leaf,
                group=benchmark.name,
                length=task.length,
                dtype=str(dtype).removeprefix("torch.") + (f" ({quantised})" if quantised else ""),
                device=device.type,
                attention="sdpa",
                chat_template=tokenizer_hash(tokenizer) if template and not plain else "",
                data_hash=task.data_hash,
                task_version=task.version,
                prompts=_prompt_digest(task),
                generation=(unasked if plain else settings).record(task.requests[0], thinks),
                packages=quantization.packages(grid.quantization),
                fingerprint=lambda policy: _fingerprint(policy, name),
                without=without,
            )
            stage.jobs.append(Job(task, prompts, cells))
    return stage


def _say_buffers(grid: Grid, leaf: str, longest: int, message: Callable[[str], None]) -> None:
    """Say where nothing can be cut while an answer is generated."""
    from kvbench.spelling import policy as make_policy

    policies = [make_policy(spec) for spec in grid.canonical_policies]
    idle = [p for p in policies if not p.is_full and p.buffer >= longest]
    if idle:
        message(
            f"{leaf}: no answer is longer than the buffer of {', '.join(map(str, idle[:3]))}"
            f"{' and others' * (len(idle) > 3)}: nothing is cut while it is generated; "
            f"{idle[0].name}:buffer={max(1, longest // 8)} would cut often"
        )


def _without(grid: Grid, model: str, message: Callable[[str], None]) -> set[str]:
    """Policies that `all` names and that cannot run on this model, for want of a file."""
    found = set()
    for policy in grid.canonical_policies:
        try:
            _fingerprint(policy, model)
        except UserError as missing:
            if grid.names(policy):
                raise
            message(f"{policy} is left out: {missing}")
            found.add(policy)
    return found


def _fingerprint(policy: str, model: str) -> str:
    """Digest of the files that a policy reads for a model."""
    from kvbench.engine.models import resolve_model
    from kvbench.spelling import policy as make_policy

    return make_policy(policy).fingerprint(resolve_model(model))


def _prompt_digest(task: LoadedTask) -> str:
    """Digest of how the task asks: its first request (the data itself is in the data hash)."""
    first = task.requests[0]
    asked = (first.context, first.question, first.until, first.max_new_tokens)
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]


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


def model_digest(name: str) -> str:
    """Digest of all of a local model that can change a response; "" for one of the hub.

    Large files are read once: their digests are kept by path, size and time of change.
    """
    from kvbench.engine.models import resolve_model

    folder = Path(resolve_model(name))
    if not folder.is_dir():
        return ""
    kept = cache_dir() / "digests.json"
    known: dict[str, str] = {}
    with suppress(OSError, ValueError):
        known = json.loads(kept.read_text())
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in _MODEL_FILES):
        state = path.stat()
        key = f"{path.resolve()}|{state.st_size}|{state.st_mtime_ns}"
        if key not in known:
            with path.open("rb") as file:
                known[key] = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.name}|{known[key]}|".encode())
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known))
        part.replace(kept)
    return digest.hexdigest()[:16]


@contextmanager
def _importing() -> Iterator[None]:
    """Keep the garbage collector off: it costs a seventh of the time that large imports take."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


def _quiet_libraries() -> None:
    """transformers says much on import that is no user's concern here."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from transformers.utils import logging as hf_logging

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
