"""Options that several commands have, in one wording. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated

import typer

Device = Annotated[
    str | None,
    typer.Option("--device", metavar="D", help="cpu, cuda, cuda:1 or auto (the default)."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="D", help="float32, bfloat16, float16 or auto.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="MAP",
        help="auto: accelerate spreads the model over the GPUs, instead of --device; what does "
        "not fit into them is refused.",
    ),
]
Quantization = Annotated[
    str | None,
    typer.Option(
        "--quantization",
        metavar="Q",
        help="Quantise weights as they are loaded: bnb-4bit, bnb-8bit or torchao-int8. Models "
        "that are quantised on disk load as they are.",
    ),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model."),
]
Template = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Whether to apply it. Default: where the tokenizer has one.",
    ),
]
Lengths = Annotated[
    list[str] | None,
    typer.Option("--length", metavar="TOKENS", help="Prompt and answer together. Default: 1024."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", help="Of data and all noise. Default: 0.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="T",
        help="Draw answers at this temperature; 0: greedily. Default, as of all that follows on "
        "answers: what the task says, mostly greedily.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Draw among the likeliest tokens that together have this probability."
    ),
]
TopK = Annotated[int | None, typer.Option(metavar="K", help="Draw among the K likeliest tokens.")]
Repeats = Annotated[
    int | None,
    typer.Option(
        metavar="K", help="Answers to each question, where they are drawn; more extend a run."
    ),
]
MaxNewTokens = Annotated[int | None, typer.Option(metavar="N", help="Limit of every answer.")]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        help="What the chat template is told as enable_thinking. What is scored is what follows "
        "the last </think>. Default: the template's own.",
    ),
]
Truncate = Annotated[
    str | None,
    typer.Option(
        metavar="middle[:TOKENS]",
        help="Cut the middle of contexts until prompt and answer fit the model, or TOKENS. "
        "Default: what does not fit is refused.",
    ),
]
