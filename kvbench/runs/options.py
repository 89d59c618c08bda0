"""The options of a run, each declared once as a field of `GridOptions`.

Command flags, keys of a YAML file and Python arguments all come from these fields. Nothing heavy is imported here, so
that the help is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from kvbench.engine.weight_schemes import scheme_name
from kvbench.errors import UserError
from kvbench.judge.choosing import judge_name
from kvbench.runs import values

WHAT, MODEL, PROMPTS, ANSWERS = "What to run", "Model", "Prompts", "Answers"
CACHE, MACHINES, OUTPUT, ANALYSIS = "Cache", "Machines", "Output", "Analysis"
LM_EVAL = "Tasks of lm-eval (docs/harnesses.md)"
"""Headings of the option groups in the help."""

FLAG = " "
"""Metavar of an option without a value; otherwise the help spends a column on `<bool>`."""

OPTION = "option"
"""Metadata key of a field that is declared as an option."""


class OptionError(UserError):
    """Error in the value of an option.

    Attributes:
        name: The field of `GridOptions`.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True)
class Option:
    """Declaration of an option.

    Attributes:
        read: Parses the user's value for the field, or raises `UserError`.
        kind: Type of the flag's value; `list` for several, separated by commas.
        panel: Heading in the help.
        metavar: Placeholder of the value in the help.
        help: Help text.
        flag: Name of the flag and of the YAML key, if not the field's.
        spelling: Spelling of a flag with a negative form, such as `--full/--no-full`.
        alias: Another flag that means the same.
        complete: Function of `kvbench.cli.complete` that completes the value.
        digest: When the option counts for the digest of the grid, because it changes a response or adds a cell:
            "always", "if set" (not None) or "never", so that a run continues with another value.
    """

    read: Callable[[Any], Any]
    kind: type
    panel: str
    metavar: str
    help: str
    flag: str = ""
    spelling: str = ""
    alias: str = ""
    complete: str = ""
    digest: str = "always"


def declare(
    default: Any, read: Callable[[Any], Any], kind: type, panel: str, metavar: str, help: str,
    **more: Any,
) -> Any:  # fmt: skip
    """Declare an option as a field of a dataclass; a default of `...` makes it required."""
    metadata = {OPTION: Option(read, kind, panel, metavar, help, **more)}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Options:
    """Options that are declared as fields, and read when an object is made."""

    def __post_init__(self) -> None:
        """Read every field.

        Raises:
            OptionError: A value is wrong.
        """
        for name, option in options(type(self)):
            try:
                values.check_texts(name, value := getattr(self, name))
                object.__setattr__(self, name, option.read(value))
            except UserError as error:
                raise OptionError(name, str(error)) from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Make the options from what a user gave, by field; None and empty lists count as not given."""
        return cls(**{name: value for name, value in given.items() if value not in (None, [], ())})

    def to_dict(self) -> dict[str, Any]:
        """Return the options as plain lists and values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class GridOptions(Options):
    """Fields of a grid and of its execution; `kvbench run --help` explains each.

    None leaves a field to the task, the model or the machine.
    """

    policies: tuple[str, ...] = declare(
        ..., values.names("policies"), list, WHAT, "NAME",
        "Policies, comma-separated: snapkv:window=64,criticalkv, ./my_policy.py:MyPolicy, or all "
        "(kvbench list policies).",
        flag="policy", complete="policies",
    )  # fmt: skip
    tasks: tuple[str, ...] = declare(
        ..., values.names("tasks"), list, WHAT, "NAME",
        "Benchmarks or tasks, comma-separated: ruler,vt, any task, group or tag of lm-eval such as arc_easy or mmlu, "
        "or your own ./mine.jsonl (kvbench list tasks --search WORD).",
        flag="task", complete="tasks",
    )  # fmt: skip
    models: tuple[str, ...] = declare(
        ("reference",), values.names("models"), list, MODEL, "NAME",
        "Models, comma-separated: reference (the default), a name of kvbench list models, a folder, a "
        "GGUF file or a hub id.",
        flag="model", complete="models",
    )  # fmt: skip
    revision: str | None = declare(
        None, values.optional(values.text("revision")), str, MODEL, "REV",
        "Branch, tag or commit of a hub model.",
    )  # fmt: skip
    device: str = declare(
        "auto", values.text("device"), str, MODEL, "DEV",
        "cpu, cuda, cuda:1 or auto (the default).",
    )  # fmt: skip
    dtype: str = declare(
        "auto", values.dtype, str, MODEL, "TYPE",
        "float32, bfloat16, float16 or auto (the default).",
    )  # fmt: skip
    attn: str = declare(
        "auto", values.attention, str, MODEL, "NAME",
        "Attention of the prefill and of all that kvbench leaves to transformers: sdpa, eager, flash_attention_2 or "
        "auto (the default: sdpa where the family has it).",
    )  # fmt: skip
    device_map: str | dict[str, str | int] | None = declare(
        None, values.optional(values.device_map), str, MODEL, "MAP",
        "auto: spread the model over all GPUs. Replaces --device.", digest="never",
    )  # fmt: skip
    quantization: str | None = declare(
        None, values.optional(scheme_name), str, MODEL, "HOW",
        "Quantise weights while loading: bnb-4bit, bnb-8bit or torchao-int8. A quantised "
        "checkpoint needs no flag.", digest="if set",
    )  # fmt: skip
    batch_size: int | str = declare(
        "auto", values.batch("batch_size"), str, MODEL, "N",
        "Maximum number of responses decoded together. Default: auto.", digest="never",
    )  # fmt: skip
    cache_memory: int | None = declare(
        None, values.optional(values.memory), str, MODEL, "SIZE",
        "Memory for the caches decoded together, such as 40GB. Default: 80% of a GPU's free memory; "
        "half of a CPU's memory, divided among the cores in use.", digest="never",
    )  # fmt: skip
    prefill_batch: int | str = declare(
        "auto", values.batch("prefill_batch"), str, MODEL, "N",
        "Maximum number of contexts prefilled together. Default: auto, which is 1 on a CPU, and enough to keep "
        "a GPU busy. With more than 1, responses can differ by rounding.", digest="never",
    )  # fmt: skip
    samples: int = declare(
        50, values.integer("samples", 1), int, PROMPTS, "N",
        "Samples per task. A larger number extends a run, a smaller one keeps it. Default: 50.",
        alias="--limit", digest="never",
    )  # fmt: skip
    lengths: tuple[int, ...] = declare(
        (1024,), values.lengths, list, PROMPTS, "TOKENS",
        "Length of prompt and answer together, comma-separated: 1024,4096. Default: 1024.",
        flag="length",
    )  # fmt: skip
    prompt_tokens: str | None = declare(
        None, values.optional(values.token_range), str, PROMPTS, "RANGE",
        "Only samples whose prompt has that many tokens, before anything is truncated: 8001-, -4096 or 4000-8000. "
        "Of the first --samples of a task.", digest="if set",
    )  # fmt: skip
    truncate: str | None = declare(
        None, values.optional(values.truncation), str, PROMPTS, "HOW",
        "middle or middle:TOKENS: remove the middle of contexts until prompt and answer fit the model, "
        "or TOKENS. Default: refuse what does not fit.", digest="if set",
    )  # fmt: skip
    chat_template: bool | None = declare(
        None, values.optional(values.truth("chat_template"), "auto"), bool, PROMPTS, FLAG,
        "Apply the chat template. Default: if the tokenizer has one.",
        spelling="--chat-template/--no-chat-template",
    )  # fmt: skip
    chat_template_everywhere: bool | None = declare(
        None, values.optional(values.truth("chat_template_everywhere")), bool, PROMPTS, FLAG,
        "Apply the chat template to tasks whose authors leave it out, too, as kvpress does.",
        spelling="--chat-template-everywhere", digest="if set",
    )  # fmt: skip
    lmms_model: str | None = declare(
        None, values.optional(values.text("lmms_model")), str, PROMPTS, "NAME",
        "Prompts that tasks of lmms-eval have for this model of lmms-eval, such as qwen3_vl. Default: those for all "
        "models.", digest="if set",
    )  # fmt: skip
    min_pixels: int | None = declare(
        None, values.optional(values.integer("min_pixels", 1)), int, PROMPTS, "N",
        "Enlarge images and video frames to at least N pixels (Qwen-VL models). Default: set by the processor.",
        digest="if set",
    )  # fmt: skip
    max_pixels: int | None = declare(
        None, values.optional(values.integer("max_pixels", 1)), int, PROMPTS, "N",
        "Shrink images and video frames to at most N pixels (Qwen-VL models). Default: set by the processor.",
        digest="if set",
    )  # fmt: skip
    max_frames: int | None = declare(
        None, values.optional(values.integer("max_frames", 1)), int, PROMPTS, "N",
        "Show at most N frames of a video, evenly spread. Default: 32, or set by the task.", digest="if set",
    )  # fmt: skip
    seed: int = declare(
        0, values.integer("seed", 0, values.INT64), int, PROMPTS, "N",
        "Seed of the data and of all noise. Default: 0.",
    )  # fmt: skip
    max_new_tokens: int | None = declare(
        None, values.optional(values.integer("max_new_tokens", 1)), int, ANSWERS, "N",
        "Maximum length of an answer. Default: set by the task.", digest="if set",
    )  # fmt: skip
    temperature: float | None = declare(
        None, values.optional(values.temperature), float, ANSWERS, "T",
        "Sample at this temperature; 0 is greedy. Default: set by the task.",
        digest="if set",
    )  # fmt: skip
    top_p: float | None = declare(
        None, values.optional(values.probability("top_p")), float, ANSWERS, "P",
        "Sample from the most likely tokens that together have this probability.",
        digest="if set",
    )  # fmt: skip
    top_k: int | None = declare(
        None, values.optional(values.integer("top_k", 1)), int, ANSWERS, "K",
        "Sample from the K most likely tokens.", digest="if set",
    )  # fmt: skip
    repeats: int | None = declare(
        None, values.optional(values.integer("repeats", 1)), int, ANSWERS, "N",
        "Samples per question (temperature > 0 only). A larger number extends a run.",
        digest="never",
    )  # fmt: skip
    thinking: bool | None = declare(
        None, values.optional(values.truth("thinking"), "auto"), bool, ANSWERS, FLAG,
        "Passed to the chat template. Only the text after the last </think> is scored.",
        spelling="--thinking/--no-thinking", digest="if set",
    )  # fmt: skip
    fidelity: bool = declare(
        False, values.truth("fidelity"), bool, ANSWERS, FLAG,
        "Also compare every cell's next-token distributions with the full cache's on the full cache's own answers: "
        "columns kl, agreement and others (docs/statistics.md). Needs no reference answers.",
        spelling="--fidelity", digest="never",
    )  # fmt: skip
    judge: str = declare(
        "auto", judge_name, str, ANSWERS, "WHO",
        "For tasks that need a judge: endpoint (KVBENCH_JUDGE_URL), local (compares words; for "
        "tests) or auto (the default: endpoint if it is set).", digest="never",
    )  # fmt: skip
    budgets: tuple[str, ...] = declare(
        ("0.2",), values.budgets, list, CACHE, "B",
        "Part of the cache that is KEPT, per layer and KV head, comma-separated: a fraction (0.2), a number of "
        "tokens (512), full, or all text and some visual tokens (visual:64). Default: 0.2. "
        "In kvpress a ratio is the fraction removed.",
        flag="budget", complete="budgets",
    )  # fmt: skip
    moments: tuple[str, ...] = declare(
        ("context",), values.moments, list, CACHE, "WHEN",
        "When to compress, comma-separated. context: before the question (the default); question: "
        "after it; decode: during the answer; chunked or chunked:512: after each chunk of the "
        "prompt; turns: before each turn of a dialogue.",
        flag="moment", complete="moments",
    )  # fmt: skip
    full: bool = declare(
        True, values.truth("full"), bool, CACHE, FLAG,
        "Also run the full cache as the reference. Default: yes.", spelling="--full/--no-full",
    )  # fmt: skip
    include_path: tuple[str, ...] | None = declare(
        None, values.optional(values.names("include_path")), str, LM_EVAL, "DIR",
        "Folders with the YAML of your own tasks, comma-separated.", digest="if set",
    )  # fmt: skip
    num_fewshot: int | None = declare(
        None, values.optional(values.integer("num_fewshot", 0)), int, LM_EVAL, "N",
        "Examples in every prompt. Default: as the task says.", digest="if set",
    )  # fmt: skip
    fewshot_as_multiturn: bool | None = declare(
        None, values.optional(values.truth("fewshot_as_multiturn")), bool, LM_EVAL, FLAG,
        "Make examples turns of the chat. Default: with a chat template.",
        spelling="--fewshot-as-multiturn/--no-fewshot-as-multiturn", digest="if set",
    )  # fmt: skip
    system_instruction: str | None = declare(
        None, values.optional(values.text("system_instruction")), str, LM_EVAL, "TEXT",
        "Text before every prompt.", digest="if set",
    )  # fmt: skip
    apply_chat_template: str | None = declare(
        None, values.template, str, LM_EVAL, "[NAME]",
        "Apply the model's chat template, or the one of that name. Default: none, as in lm-eval.", digest="if set",
    )  # fmt: skip
    gen_kwargs: str | dict[str, Any] | None = declare(
        None, values.optional(values.gen_kwargs), str, LM_EVAL, "K=V,...",
        "Change how answers are generated, such as max_gen_toks=64.", digest="if set",
    )  # fmt: skip
    context: str | None = declare(
        None, values.optional(values.choice("context", ("fewshot", "document", "prompt"))), str, LM_EVAL, "RULE",
        "What the context of a prompt is: fewshot (everything before the document), document (up to the end of its "
        "passage) or prompt (all but its last token). Default: fewshot if there are examples, otherwise document.",
        digest="if set",
    )  # fmt: skip
    context_field: str | None = declare(
        None, values.optional(values.text("context_field")), str, LM_EVAL, "NAME",
        "Field of the document that holds its passage. Default: the longest one.", digest="if set",
    )  # fmt: skip
    confirm_run_unsafe_code: bool | None = declare(
        None, values.optional(values.truth("confirm_run_unsafe_code")), bool, LM_EVAL, FLAG,
        "Allow tasks that execute code that the model writes.", spelling="--confirm-run-unsafe-code", digest="never",
    )  # fmt: skip
    executor: str = declare(
        "local", values.executor, str, MACHINES, "WHERE",
        "local (the default): this process; ray: workers on every core or GPU of this machine, "
        "or of a cluster (docs/clusters.md).", digest="never",
    )  # fmt: skip
    ray_address: str | None = declare(
        None, values.optional(values.text("ray_address")), str, MACHINES, "HOST:PORT",
        "Ray cluster to use, or auto. Default: RAY_ADDRESS, otherwise this machine only.",
        digest="never",
    )  # fmt: skip
    gpus_per_cell: float | None = declare(
        None, values.optional(values.gpus), float, MACHINES, "N",
        "GPUs of each Ray worker: 0.5 puts two on a GPU; for more than 1 add --device-map auto. "
        "Default: 1 with CUDA.", digest="never",
    )  # fmt: skip
    workers: int | None = declare(
        None, values.optional(values.integer("workers", 1)), int, MACHINES, "N",
        "Number of Ray workers. Default: as many as fit on the machines.", digest="never",
    )  # fmt: skip
    out: str | None = declare(
        None, values.optional(values.folder), str, OUTPUT, "DIR",
        "Folder of the results. Default: results/MODEL-TASK-POLICY-HASH.", digest="never",
    )  # fmt: skip


def options(declaration: type[Options] = GridOptions) -> Iterator[tuple[str, Option]]:
    """Yield each declared option of a class with the name of its field."""
    for one in fields(declaration):
        yield one.name, one.metadata[OPTION]


def field_of(key: str) -> str:
    """Return the field that a flag or YAML key sets: `policies` for `policy`."""
    return next((name for name, option in options() if option.flag == key), key)


def flag_of(name: str) -> str:
    """Return the flag of a field, without dashes: `policy` for `policies`."""
    return next((option.flag for known, option in options() if known == name), "") or name
