"""What `kvbench list` shows: a record for every policy, task, model and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.errors import UserError, nearest, quoted
from kvbench.harness import catalogue
from kvbench.harness.optional import lacking
from kvbench.named import NamedModel
from kvbench.report.table import Cell, Column, Lines, Name, Row, Table

Record = dict[str, Any]
"""Column names to values that JSON can hold."""


FAMILIES: dict[str, str] = {
    "Llama": "LlamaForCausalLM (2, 3, 3.1, 3.2 text)",
    "Mistral": "MistralForCausalLM; nothing can be evicted if every layer has a sliding window",
    "Qwen2": "Qwen2ForCausalLM (2, 2.5)",
    "Qwen3": "Qwen3ForCausalLM",
    "Phi-3": "Phi3ForCausalLM (3, 3.5 mini)",
    "Gemma-3": "Gemma3ForCausalLM; global layers are evicted from, sliding layers stay whole",
}
"""Families whose attention is tested against a masked full cache, with a note on each."""

HINTS: dict[str, str] = {
    "memory": "weights: parameters x bytes per number (2 in bfloat16; 0.56 with bnb-4bit, without "
    "the embeddings); full cache: 2 x layers x KV heads x head dim x bytes for every token; one "
    "prefilled context with its full cache and a batch of compressed caches are held at once",
    "dtype": "auto is bfloat16 on a GPU and float32 on a CPU; only float32 on a CPU gives the same "
    "bytes whatever else runs",
    "quantised": "--quantization bnb-4bit, bnb-8bit or torchao-int8 (pip install accelerate, and "
    "bitsandbytes or torchao); a checkpoint that is already quantised (GPTQ, AWQ, FP8, ...) loads "
    "with the library it needs; the cache keeps the compute dtype",
    "GGUF": "a .gguf file, or a folder with one (pip install 'kvbench[gguf]'), is dequantised once "
    "into the cache",
    "several GPUs": "--device-map auto (pip install accelerate) spreads layers and their caches "
    "over all devices; a model that would be offloaded to CPU or disk is refused",
    "tested": "every family with random weights on a CPU; bitsandbytes 0.50 and torchao 0.18 on a "
    "CPU; several devices simulated on a CPU; not tested: any of these on a GPU; GPTQ, AWQ and FP8 "
    "checkpoints",
}
"""Notes on all families."""


def policies() -> tuple[list[Record], list[str]]:
    """Every registered policy with its paper, its parts and its parameters.

    Returns:
        The records, and a line for each policy whose package does not import.
    """
    from kvbench.spelling import KINDS, policy  # loads torch, which no other list needs

    records: list[Record] = []
    failed: list[str] = []
    for name in registry.names(registry.POLICIES):
        try:
            found = policy(name)
        except UserError as error:
            failed.append(str(error))
            continue
        kinds = KINDS if found.evicts else ("read",)
        parts = {kind: part for kind in kinds if (part := getattr(found, kind)) is not None}
        parameters = [part.parameters() for part in parts.values()]
        records.append(
            {
                "name": name,
                "is": str(found),
                "summary": found.summary,
                "paper": found.paper,
                "parts": {k: p.name for k, p in parts.items()},
                "parameters": {k: v for p in parameters for k, v in p.items()}
                | ({"buffer": found.buffer} if found.evicts else {}),
                "moments": list(found.moments),
                "package": registry.origin(registry.POLICIES, name),
            }
        )
    return records, failed


def tasks() -> tuple[list[Record], list[str]]:
    """Every registered benchmark with its tasks.

    Returns:
        The records, and a line for each benchmark whose package does not import.
    """
    groups, failed = catalogue.benchmarks()
    records = [
        {
            "name": name,
            "tasks": list(group.leaves),
            "subsets": list(group.subsets),
            "needs_hub": [leaf for leaf in group.leaves if leaf in group.hub_leaves],
            "harness": group.harness,
            "media": list(group.media),
            "lacking": lacking(group),
            "metric": group.metric,
            "judge": group.judge,
            "summary": group.summary,
            "source": group.source,
            "licence": group.licence,
            "package": registry.origin(registry.TASKS, name),
        }
        for name, group in groups.items()
    ]
    return records, failed


def models() -> tuple[list[Record], list[str]]:
    """The named models, the tested families, and hints for all of them.

    Returns:
        The records, and a line for each named model whose package does not import.
    """
    named: list[Record] = []
    failed: list[str] = []
    for name in registry.names(registry.MODELS):
        try:
            named.append(_named_model(registry.get(registry.MODELS, name)))
        except UserError as error:
            failed.append(str(error))
    kinds = (("family", FAMILIES), ("hint", HINTS))
    more = [{"name": k, "note": v, "kind": kind} for kind, of in kinds for k, v in of.items()]
    return [*named, *more], failed


def _named_model(model: NamedModel) -> Record:
    """The record of a named model, which says how to get it where it is not installed."""
    try:
        model.folder()
    except UserError as error:
        state = str(error)
    else:
        state = "installed"
    return {"name": model.name, "note": f"{model.summary}; {state}", "kind": "named"}


def runs(folder: Path) -> tuple[list[Record], list[str]]:
    """The runs in a folder.

    Returns:
        The records, and no line: a damaged folder is a record that says so.

    Raises:
        UserError: There is no such folder.
    """
    from kvbench.runs.folders import find_runs  # needs pyarrow, which `--help` need not wait for

    return [{"name": run.path, **asdict(run)} for run in find_runs(folder)], []


def layouts() -> tuple[list[Record], list[str]]:
    """The published tables that `kvbench table` can be laid out like.

    Returns:
        The records, and no line.
    """
    from kvbench.layouts.published import published_layouts  # needs pandas

    return [
        {"name": name, "table": one.table.number, "paper": one.paper, "title": one.table.title,
         "lacking": one.lacking}
        for name, one in published_layouts().items()
    ], []  # fmt: skip


def recipes() -> tuple[list[Record], list[str]]:
    """The tables and figures of papers that `kvbench run --recipe` repeats.

    Returns:
        The records, and no line: what a recipe lacks stands in its record.
    """
    from kvbench.recipes import missing_parts, recipes  # needs torch

    return [
        {
            "name": name,
            "paper": one.paper,
            "item": one.item,
            "also": one.also,
            "title": one.title,
            "command": f"kvbench {one.by}",
            "missing": missing_parts(one),
            "needs": list(one.needs),
            "differs": list(one.differs),
            "full": dict(one.full),
            "miniatures": {model: one.settings([model]) for model in one.miniatures},
        }
        for name, one in recipes().items()
    ], []


KINDS = ("policies", "tasks", "models", "runs", "layouts", "recipes")
"""What can be listed."""


def records(kind: str, folder: Path = Path("results")) -> tuple[list[Record], list[str]]:
    """The records of a kind, and a line for each plugin that cannot be imported.

    Args:
        kind: One of `KINDS`.
        folder: Where to look for runs.

    Raises:
        UserError: There is no such kind or folder.
    """
    if kind not in KINDS:
        hint = nearest(kind, KINDS) or f"; choose from {', '.join(KINDS)}"
        raise UserError(f"cannot list {quoted(kind)}{hint}")
    if kind == "runs":
        return runs(folder)
    lists = {
        "policies": policies,
        "tasks": tasks,
        "models": models,
        "layouts": layouts,
        "recipes": recipes,
    }
    return lists[kind]()


def table(kind: str, rows: list[Record]) -> Table:
    """The records of a kind as a table."""
    columns, row_of = _TABLES[kind]
    return Table("", tuple(map(Column, columns)), tuple(Row(row_of(row)) for row in rows))


def _policy_row(row: Record) -> tuple[Cell, ...]:
    alias = f"the same as {row['is']}; " if row["is"] != row["name"] else ""
    lines = [alias + row["summary"], row["paper"], _pairs(row["parts"]), _pairs(row["parameters"])]
    lines.append(f"moments of its paper: {', '.join(row['moments'])}" if row["parts"] else "")
    return Name(row["name"]), Lines(tuple(line for line in lines if line))


def _pairs(values: Record) -> str:
    return " ".join(f"{key}={'none' if value is None else value}" for key, value in values.items())


def _task_row(row: Record) -> tuple[Cell, ...]:
    hub = ", ".join(row["needs_hub"]) or "no"
    if row["needs_hub"] == row["tasks"]:
        hub = "yes"
    about = row["summary"] + "; needs a judge" * bool(row["judge"])
    if row["subsets"]:
        about += f"; subsets: {', '.join(row['subsets'])}"
    if row["media"]:
        about += f"; for models that see {' and '.join(f'{kind}s' for kind in row['media'])}"
    if row["harness"] != "lm_eval":
        about += f"; scored by {row['harness']}"
    if row["lacking"]:
        about += f"; {row['lacking']}"
    tasks = [part for task in row["tasks"] for part in (", ", Name(task))][1:]
    return Name(row["name"]), Lines((tuple(tasks), about)), hub


def _run_row(row: Record) -> tuple[Cell, ...]:
    cells = f"{row['ok']} ok" + f", {row['failed']} failed" * bool(row["failed"])
    state = row["state"] + f": {row['problem']}" * bool(row["problem"])
    what = [_few(row[key]) for key in ("models", "policies", "tasks")]
    return Name(row["path"]), row["date"], *what, f"{cells} of {row['ok'] + row['failed']}", state


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _layout_row(row: Record) -> tuple[Cell, ...]:
    return Name(row["name"]), row["title"], row["lacking"]


def _recipe_row(row: Record) -> tuple[Cell, ...]:
    title = row["title"] + f"; also {row['also']}" * bool(row["also"])
    if row["command"] != "kvbench run":
        title += f" (made by {row['command']})"
    return Name(row["name"]), title, Lines(tuple(row["missing"]) or ("nothing",))


def _model_row(row: Record) -> tuple[Cell, ...]:
    return Name(row["name"]), row["note"]


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[Record], tuple[Cell, ...]]]] = {
    "policies": (("policy", "what it keeps, paper, parts, parameters with defaults"), _policy_row),
    "tasks": (("group", "tasks, and what they are", "needs the hub"), _task_row),
    "models": (("model", "what to know"), _model_row),
    "layouts": (("layout", "what it shows", "why it cannot be filled"), _layout_row),
    "recipes": (("recipe", "what it shows", "what kvbench lacks of it"), _recipe_row),
    "runs": (("run", "date", "model", "policies", "tasks", "cells", "state"), _run_row),
}
