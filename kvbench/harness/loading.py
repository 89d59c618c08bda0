"""Loading steps shared by all harnesses: task lookup, and checks of the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.tasks._yaml_loader import load_yaml  # the only loader of `include` and `!function`

from kvbench.benchmark import Benchmark
from kvbench.errors import LeftOut, UserError
from kvbench.harness import catalogue, chat
from kvbench.harness.optional import lacking
from kvbench.harness.protocol import TaskSettings


def find(task: str, benchmark: Benchmark | None) -> tuple[str, Benchmark]:
    """Return the name and the benchmark of a task; see `Harness.load`."""
    if benchmark is not None:
        if task not in benchmark.leaves:
            raise UserError(f"{benchmark.name} has no task {task!r}")
        return task, benchmark
    resolved = catalogue.resolve_task(task)
    if len(resolved) != 1:
        task_names = ", ".join(task_name for task_name, _ in resolved)
        raise UserError(f"{task!r} is a group; name one of its tasks: {task_names}")
    return resolved[0]


def settle(task_name: str, benchmark: Benchmark, settings: TaskSettings) -> TaskSettings:
    """Return the effective settings of a task.

    Raises:
        LeftOut: The model cannot read its prompts, or a package is not installed.
        UserError: The settings do not fit it.
    """
    if benchmark.media and settings.processor is None:
        media_kinds = " and ".join(f"{media_kind}s" for media_kind in benchmark.media)
        raise LeftOut(f"model {settings.tokenizer_id} takes no {media_kinds}; use --model with a vision-language model")
    if requirement := lacking(benchmark):
        raise LeftOut(f"it {requirement}")
    if settings.lexicon not in benchmark.lexicons:
        raise LeftOut(_no_prompts(benchmark, settings.lexicon))
    if settings.samples < 1:
        raise UserError(f"samples must be at least 1, not {settings.samples}")
    uses_chat = settings.chat_template and task_name not in benchmark.plain
    if benchmark.media and not uses_chat:
        raise UserError(
            f"{task_name}: only the chat template of {settings.tokenizer_id} places images in a prompt; "
            "leave out --no-chat-template"
        )
    return replace(
        settings,
        chat_template=uses_chat,
        length=settings.length if benchmark.sized else 0,
        thinking=settings.thinking if uses_chat else None,
    )


def renderer(settings: TaskSettings) -> chat.Render | None:
    """Return the chat template of the settings, or None if none is applied."""
    if not settings.chat_template:
        return None
    tokenizer_name, thinking = settings.tokenizer_id, settings.thinking
    if settings.processor is None:
        return partial(chat.chat, settings.tokenizer, tokenizer_name, thinking=thinking)
    return partial(chat.chat, settings.processor, tokenizer_name, thinking=thinking, parts=True)


def yaml_of(benchmark: Benchmark, task_name: str) -> tuple[Path, dict[str, Any]]:
    """Return the path and content of a task's YAML.

    Raises:
        UserError: There is none.
    """
    candidates = [Path(benchmark.yaml) / f"{yaml_name}.yaml" for yaml_name in (task_name, benchmark.name)]
    yaml_path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if yaml_path is None:
        raise UserError(f"{benchmark.name} has neither {candidates[0]} nor {candidates[1].name}; add one of them")
    return yaml_path, load_yaml(yaml_path, resolve_func=True)


def facts(benchmark: Benchmark, task_name: str, settings: TaskSettings, variant: str = "") -> dict[str, Any]:
    """Return the fields of a `LoadedTask` set by its benchmark; `variant` is appended to the version."""
    version = benchmark.version_of(task_name, settings.lexicon)
    chance = benchmark.chance.get(task_name, 0.0) if isinstance(benchmark.chance, Mapping) else benchmark.chance
    return {
        "name": task_name,
        "group": benchmark.name,
        "version": f"{version}+{variant}" if variant else version,
        "chance": chance,
        "length": settings.length,
        "rubric": benchmark.judge,
    }


def _no_prompts(benchmark: Benchmark, lexicon: str) -> str:
    if lexicon == "reference":
        return "the reference model knows only its own 900 words; use --model with a real model"
    lexicon_names = ", ".join(benchmark.lexicons)
    return f"{benchmark.name} has no prompts in the lexicon {lexicon!r}; it has {lexicon_names}"
