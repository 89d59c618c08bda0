"""What all harnesses do when they load a task: find it, and check the settings against it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.tasks._yaml_loader import load_yaml  # the only way to `include` and `!function`

from kvbench.benchmark import Benchmark
from kvbench.errors import LeftOut, UserError
from kvbench.harness import catalogue, chat
from kvbench.harness.optional import lacking
from kvbench.harness.protocol import TaskSettings


def find(task: str, benchmark: Benchmark | None) -> tuple[str, Benchmark]:
    """The leaf and the benchmark of a task; see `Harness.load`."""
    if benchmark is not None:
        if task not in benchmark.leaves:
            raise UserError(f"{benchmark.name} has no task {task!r}")
        return task, benchmark
    resolved = catalogue.resolve_task(task)
    if len(resolved) != 1:
        leaves = ", ".join(leaf for leaf, _ in resolved)
        raise UserError(f"{task!r} is a group; name one of its tasks: {leaves}")
    return resolved[0]


def settle(leaf: str, bench: Benchmark, settings: TaskSettings) -> TaskSettings:
    """The settings that hold for a leaf.

    Raises:
        LeftOut: The model cannot read its prompts, or a package is not installed.
        UserError: The settings do not fit it.
    """
    if bench.media and settings.processor is None:
        kinds = " and ".join(f"{kind}s" for kind in bench.media)
        raise LeftOut(
            f"model {settings.tokenizer_id} takes no {kinds}; use --model with a vision-language "
            "model"
        )
    if missing := lacking(bench):
        raise LeftOut(f"it {missing}")
    if settings.lexicon not in bench.lexicons:
        raise LeftOut(_no_prompts(bench, settings.lexicon))
    if settings.samples < 1:
        raise UserError(f"samples must be at least 1, not {settings.samples}")
    chats = settings.chat_template and leaf not in bench.plain
    if bench.media and not chats:
        raise UserError(
            f"{leaf}: only the chat template of {settings.tokenizer_id} places images in a prompt; "
            "leave out --no-chat-template"
        )
    return replace(
        settings,
        chat_template=chats,
        length=settings.length if bench.sized else 0,
        thinking=settings.thinking if chats else None,
    )


def renderer(settings: TaskSettings) -> chat.Render | None:
    """The chat template of the settings, or None if none is applied."""
    if not settings.chat_template:
        return None
    name, thinking = settings.tokenizer_id, settings.thinking
    if settings.processor is None:
        return partial(chat.chat, settings.tokenizer, name, thinking=thinking)
    return partial(chat.chat, settings.processor, name, thinking=thinking, parts=True)


def yaml_of(bench: Benchmark, leaf: str) -> tuple[Path, dict[str, Any]]:
    """The YAML of a leaf, and what it says.

    Raises:
        UserError: There is none.
    """
    files = [Path(bench.yaml) / f"{name}.yaml" for name in (leaf, bench.name)]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise UserError(f"{bench.name} has neither {files[0]} nor {files[1].name}")
    return path, load_yaml(path, resolve_func=True)


def facts(bench: Benchmark, leaf: str, settings: TaskSettings, variant: str = "") -> dict[str, Any]:
    """The fields of a `LoadedTask` that its benchmark decides; `variant` joins the version."""
    version = bench.version_of(leaf, settings.lexicon)
    chance = bench.chance.get(leaf, 0.0) if isinstance(bench.chance, Mapping) else bench.chance
    return {
        "name": leaf,
        "group": bench.name,
        "version": f"{version}+{variant}" if variant else version,
        "chance": chance,
        "length": settings.length,
        "rubric": bench.judge,
    }


def _no_prompts(bench: Benchmark, lexicon: str) -> str:
    if lexicon == "reference":
        return "the reference model knows only its own 900 words; use --model with a real model"
    known = ", ".join(bench.lexicons)
    return f"{bench.name} has no prompts in the lexicon {lexicon!r}; it has {known}"
