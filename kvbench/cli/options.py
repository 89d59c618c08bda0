"""Options that several commands have, in one wording. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from kvbench.cli import complete

WHAT, MODEL, PROMPTS, ANSWERS = "What to run", "Model", "Prompts", "Answers"
CACHE, MACHINES, OUTPUT = "Cache", "Machines", "Output"
"""Headings under which the help groups options, in this order."""

FLAG = " "
"""Metavar of an option without a value: otherwise the help spends a column on `<bool>`."""

Names = list[str] | None


def split_names(names: Sequence[str] | None) -> list[str]:
    """The names of an option that takes several with commas."""
    return [name.strip() for text in names or [] for name in text.split(",") if name.strip()]


def option(panel: str | None, metavar: str, text: str, *flags: str, **more: Any) -> Any:
    """An option of a command.

    Args:
        panel: Heading in the help; None for "Options".
        metavar: What the help shows for the value.
        text: What the help says.
        flags: Spellings of the flag; none for the name of the parameter.
        more: Further arguments of `typer.Option`.
    """
    return typer.Option(*flags, metavar=metavar, help=text, rich_help_panel=panel, **more)


Policies = Annotated[
    Names,
    option(
        WHAT,
        "NAME",
        "Policies, with commas: snapkv:window=64,criticalkv, ./my_policy.py:MyPolicy, or all "
        "(kvbench list policies).",
        autocompletion=complete.policies,
    ),
]
Tasks = Annotated[
    Names,
    option(
        WHAT,
        "NAME",
        "Groups or tasks, with commas: ruler,vt, or your own ./mine.jsonl (kvbench list tasks).",
        autocompletion=complete.tasks,
    ),
]
Models = Annotated[
    Names,
    option(
        MODEL,
        "NAME",
        "Models, with commas: reference (the default), a name of kvbench list models, a folder, a "
        "GGUF file or a hub id.",
        autocompletion=complete.models,
    ),
]
OneModel = Annotated[
    str,
    option(
        MODEL,
        "NAME",
        "reference (the default), a name of kvbench list models, a folder, a GGUF file or a hub "
        "id.",
        autocompletion=complete.models,
        show_default=False,
    ),
]
Revision = Annotated[str | None, option(MODEL, "REV", "Branch, tag or commit of a hub model.")]
Device = Annotated[str | None, option(MODEL, "DEV", "cpu, cuda, cuda:1 or auto (the default).")]
Dtype = Annotated[
    str | None,
    option(MODEL, "TYPE", "float32, bfloat16, float16 or auto (the default)."),
]
DeviceMap = Annotated[
    str | None,
    option(MODEL, "MAP", "auto: spread the model over all GPUs. Replaces --device."),
]
BatchSize = Annotated[
    str | None, option(MODEL, "N", "Most responses decoded together. Default: auto.")
]
PrefillBatch = Annotated[
    str | None,
    option(
        MODEL,
        "N",
        "Most contexts prefilled together. Default: auto, which is 1 on a CPU, and as many as keep "
        "a GPU busy. With more than 1, responses can differ by rounding.",
    ),
]
CacheMemory = Annotated[
    str | None,
    option(
        MODEL,
        "SIZE",
        "Memory for the caches that are decoded together, such as 40GB. Default: 80% of a GPU's "
        "free memory; half of a CPU's memory, shared out by the cores in use.",
    ),
]
Quantization = Annotated[
    str | None,
    option(
        MODEL,
        "HOW",
        "Quantise weights while loading: bnb-4bit, bnb-8bit or torchao-int8. A quantised "
        "checkpoint needs no flag.",
    ),
]
Budgets = Annotated[
    Names,
    option(
        CACHE,
        "B",
        "What is KEPT of the cache, per layer and KV head, with commas: a fraction (0.2), a "
        "number of tokens (512), full, or all text and some visual tokens (visual:64). Default: "
        "0.2. In kvpress a ratio is the fraction removed.",
        autocompletion=complete.budgets,
    ),
]
Lengths = Annotated[
    Names,
    option(
        PROMPTS,
        "TOKENS",
        "Length of prompt and answer together, with commas: 1024,4096. Default: 1024.",
    ),
]
Samples = Annotated[int | None, option(PROMPTS, "N", "Per task. Default: 50.")]
Seed = Annotated[int | None, option(PROMPTS, "N", "Seed of the data and of all noise. Default: 0.")]
Template = Annotated[
    bool | None,
    option(
        PROMPTS,
        FLAG,
        "Apply the chat template. Default: if the tokenizer has one.",
        "--chat-template/--no-chat-template",
    ),
]
Truncate = Annotated[
    str | None,
    option(
        PROMPTS,
        "HOW",
        "middle or middle:TOKENS: cut the middle of contexts until prompt and answer fit the "
        "model, or TOKENS. Default: refuse what does not fit.",
    ),
]
Temperature = Annotated[
    float | None,
    option(
        ANSWERS, "T", "Draw answers at this temperature; 0 is greedy. Default: as the task says."
    ),
]
TopP = Annotated[
    float | None,
    option(ANSWERS, "P", "Draw from the most likely tokens that together have this probability."),
]
TopK = Annotated[int | None, option(ANSWERS, "K", "Draw from the K most likely tokens.")]
Repeats = Annotated[
    int | None,
    option(ANSWERS, "N", "Answers drawn for each question. A larger number extends a run."),
]
MaxNewTokens = Annotated[
    int | None, option(ANSWERS, "N", "Maximum length of an answer. Default: as the task says.")
]
Thinking = Annotated[
    bool | None,
    option(
        ANSWERS,
        FLAG,
        "Passed to the chat template. Only the text after the last </think> is scored.",
        "--thinking/--no-thinking",
    ),
]
Quiet = Annotated[
    bool, option(OUTPUT, FLAG, "Print only errors and the path of the result.", "--quiet")
]
AsJson = Annotated[bool, option(OUTPUT, FLAG, "Print the results as JSON on stdout.", "--json")]
DryRun = Annotated[bool, option(OUTPUT, FLAG, "Show what would be done; do nothing.", "--dry-run")]


def given_flags(context: typer.Context, *own: str) -> dict[str, Any]:
    """The flags that were given, by name, as `Grid.from_dict` takes them.

    Args:
        context: The command's context.
        own: Names of flags that the command reads itself.
    """
    return {k: v for k, v in context.params.items() if v not in (None, [], ()) and k not in own}
