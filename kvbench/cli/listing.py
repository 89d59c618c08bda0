"""Records for `kvbench list`: one per policy, task, model or run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from kvbench import registry
from kvbench.errors import UserError, nearest, quoted
from kvbench.harness import catalogue, lmms_tasks
from kvbench.harness.named_tasks import index
from kvbench.harness.optional import lacking
from kvbench.named import NamedModel
from kvbench.plugin_facts import PluginFacts
from kvbench.tables.outputs import terminal
from kvbench.tables.table import Column, Lines, Name, Table, TableCell, TableRow
from kvbench.tables.text import counted, plain

Record = dict[str, Any]
"""Column names to JSON values."""


FAMILIES: dict[str, str] = {
    "Llama": "LlamaForCausalLM (2, 3, 3.1, 3.2 text)",
    "Mistral": "MistralForCausalLM; nothing can be evicted if every layer has a sliding window",
    "Qwen2": "Qwen2ForCausalLM (2, 2.5)",
    "Qwen3": "Qwen3ForCausalLM",
    "Phi-3": "Phi3ForCausalLM (3, 3.5 mini)",
    "Gemma-3": "Gemma3ForCausalLM; global layers are evicted from, sliding layers stay whole",
}
"""Model families whose attention is tested against a masked full cache, with notes."""

HINTS: dict[str, str] = {
    "memory": "weights: parameters x bytes per number (2 in bfloat16; 0.56 with bnb-4bit, without "
    "the embeddings); full cache: 2 x layers x KV heads x head dim x bytes for every token; one "
    "prefilled context with its full cache and a batch of compressed caches are held at once",
    "dtype": "auto is bfloat16 on a GPU and float32 on a CPU; only float32 on a CPU gives the same "
    "bytes regardless of what else runs",
    "quantised": "--quantization bnb-4bit, bnb-8bit or torchao-int8 (pip install accelerate, and "
    "bitsandbytes or torchao); a checkpoint that is already quantised (GPTQ, AWQ, FP8, ...) loads "
    "with the library it needs; the cache keeps the compute dtype",
    "GGUF": "a .gguf file, or a folder with one (pip install 'kvbench[gguf]'), is dequantised once into the cache",
    "several GPUs": "--device-map auto (pip install accelerate) spreads layers and their caches "
    "over all devices; a model that would be offloaded to CPU or disk is refused",
    "tested": "every family with random weights on a CPU; bitsandbytes 0.50 and torchao 0.18 on a "
    "CPU; several devices simulated on a CPU; not tested: any of these on a GPU; GPTQ, AWQ and FP8 "
    "checkpoints",
}
"""Notes on all model families."""


def policies() -> tuple[list[Record], list[str]]:
    """List every registered policy with its paper, parts and parameters.

    Returns:
        The records, and a message per policy whose package does not import.
    """
    policy_records: list[Record] = []
    failures: list[str] = []
    with PluginFacts() as facts:
        for policy_name in registry.names(registry.POLICIES):
            try:
                policy_records.append(facts.get(f"policy {policy_name}", partial(policy_record, policy_name)))
            except UserError as error:
                failures.append(str(error))
    return policy_records, failures


def policy_record(policy_name: str) -> Record:
    """Return the record of a registered policy.

    Raises:
        UserError: The name is unknown, or the policy's package does not import.
    """
    from kvbench.spelling import KINDS, policy  # loads torch, which other lists do not need

    package = registry.origin(registry.POLICIES, policy_name)
    loaded_policy = policy(policy_name)
    part_kinds = KINDS if loaded_policy.evicts else ("read",)
    components = {
        part_kind: component for part_kind in part_kinds if (component := getattr(loaded_policy, part_kind)) is not None
    }
    parameters = [component.parameters() for component in components.values()]
    return {
        "name": policy_name,
        "is": str(loaded_policy),
        "summary": loaded_policy.summary,
        "paper": loaded_policy.paper,
        "parts": {part_kind: component.name for part_kind, component in components.items()},
        "parameters": {key: default for part_defaults in parameters for key, default in part_defaults.items()}
        | ({"buffer": loaded_policy.buffer} if loaded_policy.evicts else {}),
        "moments": list(loaded_policy.moments),
        "informed": loaded_policy.is_informed,
        "package": package,
    }


def tasks() -> tuple[list[Record], list[str]]:
    """List every registered benchmark with its tasks.

    Returns:
        The records, and a message per benchmark whose package does not import.
    """
    benchmarks, failures = catalogue.benchmarks()
    records = [
        {
            "name": group_name,
            "tasks": list(benchmark.leaves),
            "subsets": list(benchmark.subsets),
            "needs_hub": [task_name for task_name in benchmark.leaves if task_name in benchmark.hub_leaves],
            "harness": benchmark.harness,
            "media": list(benchmark.media),
            "lacking": lacking(benchmark),
            "metric": benchmark.metric,
            "judge": benchmark.judge,
            "summary": benchmark.summary,
            "source": benchmark.source,
            "licence": benchmark.licence,
            "package": registry.origin(registry.TASKS, group_name),
        }
        for group_name, benchmark in benchmarks.items()
    ]
    return records, failures


def found_tasks(word: str, include_path: Sequence[str] = ()) -> tuple[list[Record], list[str]]:
    """List the tasks, groups and tags whose name contains a word, kvbench's own first.

    Args:
        word: Part of a name, in upper or lower case.
        include_path: Folders with the YAML of the user's own tasks.

    Returns:
        The records, and a message per file of the user's own that cannot be read.

    Raises:
        UserError: No name contains the word.
    """
    own_names: dict[str, tuple[str, str]] = {}
    for group_name, benchmark in catalogue.benchmarks()[0].items():
        kinds = {"task": benchmark.leaves, "subset": benchmark.subsets, "group": [group_name]}
        own_names |= {name: (kind, group_name) for kind, names in kinds.items() for name in names}
    found = [
        {"name": name, "kind": kind, "source": f"kvbench, {group_name}"}
        for name, (kind, group_name) in own_names.items()
        if word.lower() in name.lower()
    ]
    text_names = index.names(include_path)
    for name, entry in sorted(text_names.items()):
        if word.lower() in name.lower():
            spelling = f"{index.PREFIX}{name}" if name in own_names else name
            kind = "task" if entry.kind in index.TASKS else entry.kind.lower()
            found.append({"name": spelling, "kind": kind, "source": f"lm-eval{_folder_of(entry.yaml)}"})
    for name, picture_entry in sorted(lmms_tasks.names().items()):
        if word.lower() in name.lower():
            spelling = f"{lmms_tasks.PREFIX}{name}" if name in own_names or name in text_names else name
            kind = lmms_tasks.TASK if picture_entry.kind == lmms_tasks.CLASS else picture_entry.kind
            found.append({"name": spelling, "kind": kind, "source": f"lmms-eval{_folder_of(picture_entry.yaml)}"})
    if not found:
        raise UserError(f"no task has {quoted(word)} in its name; use a shorter word")
    return found, index.broken_files(include_path)


def _folder_of(yaml: str) -> str:
    """Return the folder of a task's YAML, for people to read."""
    return f", {Path(yaml).parent.name}" if yaml else ""


def models() -> tuple[list[Record], list[str]]:
    """List the named models, the tested families, and notes on all of them.

    Returns:
        The records, and a message per named model whose package does not import.
    """
    model_records: list[Record] = []
    failures: list[str] = []
    for model_name in registry.names(registry.MODELS):
        try:
            model_records.append(_named_model(registry.get(registry.MODELS, model_name)))
        except UserError as error:
            failures.append(str(error))
    note_kinds = (("family", FAMILIES), ("hint", HINTS))
    note_records = [
        {"name": name, "note": note, "kind": kind} for kind, notes in note_kinds for name, note in notes.items()
    ]
    return [*model_records, *note_records], failures


def _named_model(model: NamedModel) -> Record:
    """Return the record of a named model, with install instructions if it is missing."""
    try:
        model.folder()
    except UserError as error:
        install_state = str(error)
    else:
        install_state = "installed"
    return {"name": model.name, "note": f"{model.summary}; {install_state}", "kind": "named"}


def model_check(model_name: str) -> Record:
    """Test whether kvbench's attention equals transformers' own in a model; see `kvbench.engine.model_check`.

    Returns:
        The errors of its modules; `problem` says why kvbench cannot run the model, "" if it can.

    Raises:
        UserError: The model cannot be loaded.
    """
    from kvbench.engine.loading import load_model, pick_device, pick_dtype
    from kvbench.engine.model_check import measure_model
    from kvbench.runs.planning import quiet_libraries

    quiet_libraries()
    device = pick_device("auto")
    dtype = pick_dtype("auto", device)
    model = load_model(model_name, None, device, dtype, check=False)
    record: Record = {"name": model_name, "dtype": str(dtype).removeprefix("torch."), "device": device.type}
    try:
        result = measure_model(model)
    except UserError as error:
        return record | {"problem": str(error), "one_by_one": False, "seconds": 0.0, "modules": []}
    tests = {"attention": result.attention, "chunk": result.chunk, "whole": result.whole}
    return record | {
        "problem": result.problem,
        "one_by_one": result.one_by_one,
        "seconds": result.seconds,
        "modules": [
            {"test": test, **asdict(module_error), "limit": result.limit}
            for test, module_errors in tests.items()
            for module_error in module_errors
        ],
    }


def render_model_check(record: Record) -> RenderableType:
    """Render the output of `model_check`."""
    notes = [f"{record['dtype']} on {record['device']}, {record['seconds']:.1f} s"]
    if record["one_by_one"]:
        notes.append("transformers loses the model's states between several tokens: kvbench feeds them one by one")
    columns = [Column("compared"), Column("module")]
    columns += [Column(title, align="right") for title in ("modules", "layer", "error", "limit")]
    rows = [
        TableRow(
            (
                _COMPARED[module["test"]],
                Name(module["kind"]),
                *(str(module[key]) for key in ("count", "layer")),
                *(f"{module[key]:.0e}" for key in ("error", "limit")),
            )
        )
        for module in record["modules"]
    ]
    return terminal(Table("", tuple(columns), tuple(rows), tuple(notes)), boxed=False)


def runs(folder: Path) -> tuple[list[Record], list[str]]:
    """List the runs in a folder.

    Returns:
        The records and no messages; a damaged run is reported in its record.

    Raises:
        UserError: The folder does not exist.
    """
    from kvbench.runs.folders import find_runs  # needs pyarrow, which `--help` should not load

    return [{"name": run.path, **asdict(run)} for run in find_runs(folder)], []


def layouts() -> tuple[list[Record], list[str]]:
    """List the published tables that `kvbench table` can reproduce.

    Returns:
        The records and no messages.
    """
    from kvbench.papers.layouts.from_papers import published_layouts  # needs pandas

    return [
        {
            "name": layout_name,
            "table": paper_layout.table.number,
            "paper": paper_layout.paper,
            "title": paper_layout.table.title,
            "lacking": paper_layout.lacking,
        }
        for layout_name, paper_layout in published_layouts().items()
    ], []


def recipes() -> tuple[list[Record], list[str]]:
    """List the tables and figures of papers that `kvbench run --recipe` reproduces.

    Returns:
        The records and no messages; missing parts of a recipe are listed in its record.
    """
    with PluginFacts() as facts:
        return facts.get(f"recipes with lm-eval {version('lm-eval')}", _recipe_records), []


def _recipe_records() -> list[Record]:
    from kvbench.papers.recipes import missing_parts, recipes  # loads torch

    return [
        {
            "name": recipe_name,
            "paper": paper_recipe.paper,
            "item": paper_recipe.item,
            "also": paper_recipe.also,
            "title": paper_recipe.title,
            "command": f"kvbench {paper_recipe.by}",
            "missing": missing_parts(paper_recipe),
            "needs": list(paper_recipe.needs),
            "differs": list(paper_recipe.differs),
            "full": dict(paper_recipe.full),
            "miniatures": {model: paper_recipe.settings([model]) for model in paper_recipe.miniatures},
        }
        for recipe_name, paper_recipe in recipes().items()
    ]


def items(paper_name: str) -> list[Record]:
    """List all tables and figures of a paper, with the recipe and layout of each, or the reason why it has none.

    Raises:
        UserError: There is no such paper.
    """

    def paper_records() -> list[Record]:
        from kvbench.papers.recipes import paper_items  # loads torch

        return [asdict(item) for item in paper_items(paper_name)]

    with PluginFacts() as facts:
        found_records: list[Record] = facts.get(f"items of {paper_name}", paper_records)
    return found_records


_COMPARED = {
    "attention": "kvbench to transformers",
    "chunk": "4 tokens at once to one by one",
    "whole": "no cache to one by one",
}
"""What is compared in each test of `model_check`."""

KINDS = ("policies", "tasks", "models", "runs", "layouts", "recipes")
"""Kinds of lists."""

RUNS_FOLDER = "results"
"""Folder to search for runs if none is given."""


def records(list_kind: str, selection: str | None = None) -> tuple[list[Record], list[str]]:
    """Return the records of a kind, and a message per plugin that cannot be imported.

    Args:
        list_kind: One of `KINDS`.
        selection: The only policy to list, or the folder to search for runs (by default `results`).

    Raises:
        UserError: The kind or the policy is unknown, the folder does not exist, or nothing can be selected.
    """
    if list_kind not in KINDS:
        hint = nearest(list_kind, KINDS) or f"; choose from {', '.join(KINDS)}"
        raise UserError(f"cannot list {quoted(list_kind)}{hint}")
    if list_kind == "runs":
        return runs(Path(selection or RUNS_FOLDER))
    if list_kind == "policies" and selection is not None:
        with PluginFacts() as facts:
            return [facts.get(f"policy {selection}", lambda: policy_record(selection))], []
    if selection is not None:
        raise UserError(f"kvbench list {list_kind} takes no name or folder; leave out {quoted(selection)}")
    list_functions = {
        "policies": policies,
        "tasks": tasks,
        "models": models,
        "layouts": layouts,
        "recipes": recipes,
    }
    return list_functions[list_kind]()


def render_list(list_kind: str, list_records: list[Record]) -> RenderableType:
    """Render the records of a kind for `rich.print`.

    Args:
        list_kind: One of `KINDS`, "policy" for all that is known about a policy, "names" for found tasks, or "items"
            for the tables and figures of a paper.
        list_records: Output of `records`, `found_tasks` or `items`.
    """
    if list_kind == "runs":
        return Group(*(line for record in list_records for line in _run_lines(record)))
    column_titles, make_row = _TABLES[list_kind]
    is_overview = list_kind == "policies"
    table = Table(
        "",
        tuple(Column(title, cut=is_overview and title != "policy") for title in column_titles),
        tuple(TableRow(make_row(record)) for record in list_records),
        ("kvbench list policies NAME shows the paper, parts and parameters of one",) * is_overview,
    )
    return terminal(table, boxed=False)


def _policy_row(record: Record) -> tuple[TableCell, ...]:
    return Name(record["name"]), _policy_summary(record)


def _policy_summary(record: Record) -> str:
    alias_text = f"the same as {record['is']}; " if record["is"] != record["name"] else ""
    return alias_text + str(record["summary"])


def _full_policy_row(record: Record) -> tuple[TableCell, ...]:
    policy_lines = [
        _policy_summary(record),
        record["paper"],
        _pairs(record["parts"]),
        _pairs(record["parameters"]),
    ]
    policy_lines.append(f"moments of its paper: {', '.join(record['moments'])}" if record["parts"] else "")
    return Name(record["name"]), Lines(tuple(policy_line for policy_line in policy_lines if policy_line))


def _pairs(parameters: Record) -> str:
    return " ".join(
        f"{parameter}={'none' if parameter_value is None else parameter_value}"
        for parameter, parameter_value in parameters.items()
    )


def _task_row(record: Record) -> tuple[TableCell, ...]:
    hub_text = ", ".join(record["needs_hub"]) or "no"
    if record["needs_hub"] == record["tasks"]:
        hub_text = "yes"
    summary = record["summary"] + "; needs a judge" * bool(record["judge"])
    if record["subsets"]:
        summary += f"; subsets: {', '.join(record['subsets'])}"
    if record["media"]:
        summary += f"; for models that see {' and '.join(f'{kind}s' for kind in record['media'])}"
    if record["harness"] != "lm_eval":
        summary += f"; scored by {record['harness']}"
    if record["lacking"]:
        summary += f"; {record['lacking']}"
    task_cells = [task_cell for task_name in record["tasks"] for task_cell in (", ", Name(task_name))][1:]
    return Name(record["name"]), Lines((tuple(task_cells), summary)), hub_text


def _found_row(record: Record) -> tuple[TableCell, ...]:
    return Name(record["name"]), record["kind"], record["source"]


def _run_lines(record: Record) -> Iterator[RenderableType]:
    """Yield a run's folder, and below it what is in it, because columns would be too narrow for its lists."""
    cell_text = f"{record['ok']} ok" + f", {record['failed']} failed" * bool(record["failed"])
    state_text = record["state"] + f": {record['problem']}" * bool(record["problem"])
    cell_count = record["ok"] + record["failed"]
    yield Text(plain(record["path"]), "bold")
    for line in (
        f"{record['date']} · {_few(record['models'])} · {cell_text} of {counted(cell_count, 'cell')} · {state_text}",
        f"policies: {_few(record['policies'])}",
        f"tasks: {_few(record['tasks'])}",
    ):
        yield Padding(Text(plain(line)), _INDENT)


def _few(names: list[str]) -> str:
    remainder = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + remainder


def _layout_row(record: Record) -> tuple[TableCell, ...]:
    return Name(record["name"]), record["title"], record["lacking"]


def _recipe_row(record: Record) -> tuple[TableCell, ...]:
    recipe_title = record["title"] + f"; also {record['also']}" * bool(record["also"])
    if record["command"] != "kvbench run":
        recipe_title += f" (made by {record['command']})"
    return Name(record["name"]), recipe_title, Lines(tuple(record["missing"]) or ("nothing",))


def _item_row(record: Record) -> tuple[TableCell, ...]:
    made_by = Name(record["recipe"]) if record["recipe"] else record["reason"]
    return record["item"], record["title"], made_by, Name(record["layout"]) if record["layout"] else None


def _model_row(record: Record) -> tuple[TableCell, ...]:
    return Name(record["name"]), record["note"]


_TABLES: dict[str, tuple[tuple[str, ...], Callable[[Record], tuple[TableCell, ...]]]] = {
    "policies": (("policy", "what it keeps"), _policy_row),
    "policy": (("policy", "what it keeps, paper, parts, parameters with defaults"), _full_policy_row),
    "tasks": (("group", "tasks, and what they are", "needs the hub"), _task_row),
    "names": (("task", "kind", "from"), _found_row),
    "models": (("model", "what to know"), _model_row),
    "layouts": (("layout", "what it shows", "why it cannot be filled"), _layout_row),
    "recipes": (("recipe", "what it shows", "what kvbench lacks of it"), _recipe_row),
    "items": (("item", "what it shows", "recipe, or why there is none", "layout"), _item_row),
}
_INDENT = (0, 0, 0, 2)
"""Padding of the lines below a run's folder: top, right, bottom, left."""
