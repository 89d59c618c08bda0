"""Options that several commands have, in one wording. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvbench.cli import complete

WHAT, MODEL, PROMPTS, ANSWERS = "What to run", "Model", "Prompts", "Answers"
CACHE, OUTPUT = "Cache", "Output"
"""Headings under which the help groups options, in this order."""

FLAG = " "
"""Metavar of an option without a value: otherwise the help spends a column on `<bool>`."""

Names = list[str] | None

Policies = Annotated[
    Names,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="Policies, with commas: snapkv:window=64,criticalkv, ./my_policy.py:MyPolicy, or all "
        "(kvbench list policies).",
        autocompletion=complete.policies,
        rich_help_panel=WHAT,
    ),
]
Tasks = Annotated[
    Names,
    typer.Option(
        "--task",
        metavar="NAME",
        help="Groups or tasks, with commas: ruler,vt, or your own ./mine.jsonl (kvbench list "
        "tasks).",
        autocompletion=complete.tasks,
        rich_help_panel=WHAT,
    ),
]
Models = Annotated[
    Names,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Models, with commas: reference (the default), a local folder or a hub id.",
        autocompletion=complete.models,
        rich_help_panel=MODEL,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option(
        "--revision",
        metavar="REV",
        help="Branch, tag or commit of a hub model.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEV",
        help="cpu, cuda, cuda:1 or auto (the default).",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="float32, bfloat16, float16 or auto (the default).",
        rich_help_panel=MODEL,
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="auto: spread the model over all GPUs. Replaces --device.",
        rich_help_panel=MODEL,
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="HOW",
        help="Quantise weights while loading: bnb-4bit, bnb-8bit or torchao-int8. A quantised "
        "checkpoint needs no flag.",
        rich_help_panel=MODEL,
    ),
]
Budgets = Annotated[
    Names,
    typer.Option(
        "--budget",
        metavar="B",
        help="What is KEPT of the cache, per layer and KV head, with commas: a fraction (0.2), a "
        "number of tokens (512) or full. Default: 0.2. In kvpress a ratio is the fraction "
        "removed.",
        autocompletion=complete.budgets,
        rich_help_panel=CACHE,
    ),
]
Lengths = Annotated[
    Names,
    typer.Option(
        "--length",
        metavar="TOKENS",
        help="Length of prompt and answer together, with commas: 1024,4096. Default: 1024.",
        rich_help_panel=PROMPTS,
    ),
]
Samples = Annotated[
    int | None,
    typer.Option("--samples", metavar="N", help="Per task. Default: 50.", rich_help_panel=PROMPTS),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the data and of all noise. Default: 0.",
        rich_help_panel=PROMPTS,
    ),
]
Template = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        metavar=FLAG,
        help="Apply the chat template. Default: if the tokenizer has one.",
        rich_help_panel=PROMPTS,
    ),
]
Truncate = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="middle or middle:TOKENS: cut the middle of contexts until prompt and answer fit the "
        "model, or TOKENS. Default: refuse what does not fit.",
        rich_help_panel=PROMPTS,
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Draw answers at this temperature; 0 is greedy. Default: as the task says.",
        rich_help_panel=ANSWERS,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P",
        help="Draw from the most likely tokens that together have this probability.",
        rich_help_panel=ANSWERS,
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(metavar="K", help="Draw from the K most likely tokens.", rich_help_panel=ANSWERS),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Answers drawn for each question. A larger number extends a run.",
        rich_help_panel=ANSWERS,
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Maximum length of an answer. Default: as the task says.",
        rich_help_panel=ANSWERS,
    ),
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        metavar=FLAG,
        help="Passed to the chat template. Only the text after the last </think> is scored.",
        rich_help_panel=ANSWERS,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        metavar=FLAG,
        help="Print only errors and the path of the result.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar=FLAG,
        help="Print the results as JSON on stdout.",
        rich_help_panel=OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar=FLAG,
        help="Show what would be done; do nothing.",
        rich_help_panel=OUTPUT,
    ),
]


def given_flags(context: typer.Context, *own: str) -> dict[str, Any]:
    """The flags that were given, by name, as `Grid.from_dict` takes them.

    Args:
        context: The command's context.
        own: Names of flags that the command reads itself.
    """
    return {k: v for k, v in context.params.items() if v not in (None, [], ()) and k not in own}
