"""lm-eval (0.4.13) as a harness: its YAML says what is asked and how an answer is scored.

Neither `simple_evaluate` (it reseeds global generators and starts processes) nor a model class of
lm-eval is used. A task is built once from its YAML and our rows; its prompts go to the runner;
responses are put back and go through the task's own filters, metric and aggregation.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.benchmark import Benchmark, Doc
from kvbench.data.sources import hinting
from kvbench.decoding import Thinking, answer
from kvbench.errors import LeftOut, UserError
from kvbench.harness import chat, dialogue
from kvbench.harness import rows as data
from kvbench.harness.encode import count_tokens, tokenizer_hash
from kvbench.harness.protocol import Key, LoadedTask, Request
from kvbench.harness.requests import requests
from kvbench.judge import choose, settle

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LmEvalHarness:
    """Loads tasks whose prompts and metric are an lm-eval YAML."""

    name = "lm_eval"

    def load(
        self,
        task: str,
        *,
        length: int,
        samples: int,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_id: str,
        lexicon: str,
        chat_template: bool,
        cache_dir: Path,
        thinking: bool | None = None,
        benchmark: Benchmark | None = None,
    ) -> LmEvalTask:
        """Load a leaf task; see `Harness.load`.

        Args:
            benchmark: Where the task is from; None looks it up among the installed ones.
        """
        leaf, bench = _find(task, benchmark)
        if lexicon not in bench.lexicons:
            raise LeftOut(_no_prompts(bench, lexicon))
        if samples < 1:
            raise UserError(f"samples must be at least 1, not {samples}")
        chats = chat_template and leaf not in bench.plain
        thinking = thinking if chats else None
        render = partial(chat.chat, tokenizer, tokenizer_id, thinking=thinking) if chats else None
        with hinting(leaf):
            rows, data_hash = _rows(
                bench,
                leaf,
                length,
                samples,
                seed,
                tokenizer,
                lexicon,
                render,
                thinking,
                Path(cache_dir),
            )
        docs, places = dialogue.flat(rows, render is not None)
        with _quiet():
            built = _build(bench, leaf, docs, seed)
            made = requests(built, leaf, docs, places, render)
        loaded = _loaded(bench, leaf, length if bench.sized else 0, data_hash, built, rows, made)
        loaded.thinks = Thinking.of(tokenizer) is not None
        return loaded


@dataclass
class LmEvalTask(LoadedTask):
    """A task of lm-eval with its rows. See `LoadedTask`.

    Attributes:
        built: lm-eval's task.
        filter: Which of its filters counts.
        thinks: Whether the model may think: what is scored is what follows that.
    """

    built: Any = None
    filter: str = "none"
    thinks: bool = False
    _ids: dict[tuple[str, int], int] = field(default_factory=dict)
    _instances: dict[int, Any] = field(default_factory=dict)

    def score(self, responses: Mapping[Key, str]) -> tuple[dict[Key, float], float]:
        """Score responses with lm-eval's filters, metric and aggregation; see `LoadedTask.score`.

        Every repeat of a question counts as a response of its own.
        """
        from lm_eval.api.instance import Instance

        keys = sorted(responses, key=lambda key: (self._ids[key[:2]], key[2]))
        if not keys:
            return {}, float("nan")
        requests = {(r.sample_id, r.question_id): r for r in self.requests}
        instances = []
        for key in keys:
            source = self._instances[self._ids[key[:2]]]
            instance = Instance(
                source.request_type, source.doc, source.arguments, 0, (self.name, source.doc_id, 1)
            )
            asked, said = requests[key[:2]], responses[key]
            if self.thinks and not asked.given:  # where text was given, the response is a record
                said = answer(said, asked.until)
            instance.resps = [said]
            instances.append(instance)
        with _quiet():
            before, self.built._instances = self.built._instances, instances
            try:
                self.built.apply_filters()
                names = [f"sample {key[0]}, question {key[1]}" for key in keys]
                judge = self.judge or (choose() if self.rubric else None)
                values = settle(judge, self._value, instances, names)
                aggregate = self.built.aggregation()[self.metric]
                alone = [v if isinstance(v, int | float) else aggregate([v]) for v in values]
                total = float(aggregate(values))
            finally:
                self.built._instances = before
        return dict(zip(keys, map(float, alone), strict=True)), total

    def _value(self, instance: Any) -> Any:
        return self.built.process_results(instance.doc, [instance.filtered_resps[self.filter]])[
            self.metric
        ]


def _no_prompts(bench: Benchmark, lexicon: str) -> str:
    if lexicon == "reference":
        return (
            f"the reference model knows 900 words of its own and cannot read {bench.name}; "
            "--model with a real one would be right"
        )
    there = ", ".join(bench.lexicons)
    return f"{bench.name} has no prompts for the lexicon {lexicon!r}; it has {there}"


def _find(task: str, benchmark: Benchmark | None) -> tuple[str, Benchmark]:
    if benchmark is not None:
        if task not in benchmark.leaves:
            raise UserError(f"{benchmark.name} has no task {task!r}")
        return task, benchmark
    from kvbench.harness.catalogue import resolve_task

    found = resolve_task(task)
    if len(found) != 1:
        leaves = ", ".join(leaf for leaf, _ in found)
        raise UserError(f"{task!r} is a group; name one of its tasks: {leaves}")
    return found[0]


# --- rows -----------------------------------------------------------------------------------------


def _rows(
    bench: Benchmark,
    leaf: str,
    length: int,
    samples: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    lexicon: str,
    render: Any,
    thinking: bool | None,
    cache_dir: Path,
) -> tuple[list[Doc], str]:
    """The rows of a leaf, and the hash that names them."""
    size = _Size(tokenizer, render)

    def make(count: int) -> Any:
        return bench.docs(
            leaf,
            length=length,
            samples=count,
            seed=seed,
            tokenizer=tokenizer,
            lexicon=lexicon,
            cache_dir=cache_dir,
            size=size,
        )

    # What the rows depend on besides the generator: a file of this name is looked into first.
    depends = [
        bench.name,
        leaf,
        bench.version,
        tokenizer_hash(tokenizer),
        length,
        seed,
        lexicon,
        render is not None,
        *([] if thinking is None else [thinking]),
    ]
    name = f"{leaf}-{data.digest(depends)}.jsonl"
    if bench.sized:
        rows = data.cached(cache_dir / "data" / bench.name / name, samples, make)
        data_hash = data.digest([*depends, rows[0]])
    else:
        given = make(samples)
        content = [row for _, row in data.read_rows(given)] if isinstance(given, Path) else given
        rows, data_hash = content[:samples], data.digest([bench.version, content])
    full = []
    for i, row in enumerate(rows):
        complete = dialogue.complete if dialogue.is_dialogue(row) else data.complete
        full.append(complete(row, f"{leaf}, row {i}"))
    return full, data_hash


@dataclass(frozen=True)
class _Size:
    """Counts prompts as the model will see them; the `size` of `Benchmark.docs`."""

    tokenizer: PreTrainedTokenizerBase
    render: chat.Render | None

    def __call__(self, context: str, question: str, gen_prefix: str = "") -> int:
        return count_tokens(
            self.tokenizer, chat.prompt(context + question, gen_prefix, self.render)
        )

    def dialogue(self, row: Doc) -> int:
        """Tokens of the last turn's prompt."""
        return count_tokens(self.tokenizer, dialogue.last_prompt(row, self.render))


# --- lm-eval's task -------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval and datasets silent, and Python's global generator, which lm-eval draws on."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import datasets

    names = ("lm_eval", "lm-eval", "datasets")
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in names]
    bars = datasets.utils.are_progress_bars_disabled()
    for logger, _ in levels:
        logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
        for logger, level in levels:
            logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()


def _build(bench: Benchmark, leaf: str, rows: Sequence[Doc], seed: int) -> Any:
    """Build lm-eval's task from the benchmark's YAML over our rows."""
    import datasets
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml  # the one way to `include` and `!function`

    folder = Path(bench.yaml)
    files = [folder / f"{name}.yaml" for name in (leaf, bench.name)]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise UserError(f"{bench.name} has neither {files[0]} nor {files[1].name}")
    config = load_yaml(path, resolve_func=True)
    # `extra` is ours; its fields differ from row to row, which Arrow would fill up with nulls.
    plain = [{k: v for k, v in row.items() if k != "extra"} for row in rows]
    split = config.get("test_split") or "test"
    table = datasets.Dataset.from_list(plain)
    asks = config.get("doc_to_text")
    if isinstance(asks, str) and asks not in plain[0] and "doc_to_choice" not in config:
        config["doc_to_text"] = _template(asks)
    config |= {
        "task": leaf,
        "test_split": split,
        "custom_dataset": lambda **_: {split: table},
        "metadata": {"version": bench.version},
    }
    built = TaskManager(include_defaults=False).load([config])["tasks"][leaf]
    if built.OUTPUT_TYPE != "generate_until":
        raise UserError(f"{path}: output_type must be generate_until, not {built.OUTPUT_TYPE}")
    built.set_fewshot_seed(seed)
    return built


def _template(text: str) -> Callable[[Doc], str]:
    """lm-eval's own template, compiled once instead of once a row."""
    from lm_eval.utils import env

    compiled = env.from_string(text)
    return lambda row: compiled.render(**row)


def _loaded(
    bench: Benchmark,
    leaf: str,
    length: int,
    data_hash: str,
    built: Any,
    rows: Sequence[Doc],
    made: list[Request],
) -> LmEvalTask:
    metric, _, wanted = bench.metric.partition(",")
    known = list(built.aggregation())
    if metric not in known:
        raise UserError(f"{bench.name}: its YAML has no metric {metric!r}; it has {known}")
    filters = [f.name for f in built._filters]
    chance = bench.chance.get(leaf, 0.0) if isinstance(bench.chance, Mapping) else bench.chance
    return LmEvalTask(
        name=leaf,
        group=bench.name,
        version="+".join([bench.version, *filter(None, [rows[0].get("variant")])]),
        data_hash=data_hash,
        metric=metric,
        rubric=bench.judge,
        higher_is_better=bool(built.higher_is_better()[metric]),
        chance=chance,
        length=length,
        requests=made,
        built=built,
        filter=wanted or filters[0],
        _ids={(r.sample_id, r.question_id): r.doc_id for r in made},
        _instances=dict(enumerate(built.instances)),
    )
