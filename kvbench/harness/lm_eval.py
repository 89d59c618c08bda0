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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.harness import data
from kvbench.harness.encode import count_tokens, tokenizer_hash
from kvbench.harness.protocol import LEXICONS, Benchmark, Doc, Key, LoadedTask, Request

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
        benchmark: Benchmark | None = None,
    ) -> LmEvalTask:
        """Load a leaf task; see `Harness.load`.

        Args:
            benchmark: Where the task is from; None looks it up among the installed ones.
        """
        leaf, bench = _find(task, benchmark)
        if lexicon not in bench.lexicons:
            raise UserError(
                f"{bench.name} has no prompts for the lexicon {lexicon!r}; "
                f"it has {', '.join(bench.lexicons)} (there are {', '.join(LEXICONS)})"
            )
        if samples < 1:
            raise UserError(f"samples must be at least 1, not {samples}")
        render = partial(_chat, tokenizer, tokenizer_id) if chat_template else None
        rows, data_hash = _rows(
            bench, leaf, length, samples, seed, tokenizer, lexicon, render, Path(cache_dir)
        )
        with _quiet():
            built = _build(bench, leaf, rows, seed)
            requests = _requests(built, leaf, rows, render)
        return _loaded(bench, leaf, length if bench.sized else 0, data_hash, built, rows, requests)


@dataclass
class LmEvalTask(LoadedTask):
    """A task of lm-eval with its rows. See `LoadedTask`."""

    built: Any = None
    filter: str = "none"
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
        instances = []
        for key in keys:
            source = self._instances[self._ids[key[:2]]]
            instance = Instance(
                source.request_type, source.doc, source.arguments, 0, (self.name, source.doc_id, 1)
            )
            instance.resps = [responses[key]]
            instances.append(instance)
        with _quiet():
            before, self.built._instances = self.built._instances, instances
            try:
                self.built.apply_filters()
                values = [self._value(instance) for instance in instances]
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


def _find(task: str, benchmark: Benchmark | None) -> tuple[str, Benchmark]:
    if benchmark is not None:
        if task not in benchmark.leaves:
            raise UserError(f"{benchmark.name} has no task {task!r}")
        return task, benchmark
    from kvbench.registry import resolve_task

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
    cache_dir: Path,
) -> tuple[list[Doc], str]:
    """The rows of a leaf, and the hash that names them."""

    def size(context: str, question: str, gen_prefix: str = "") -> int:
        return count_tokens(tokenizer, _plain(context + question, gen_prefix, render))

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
    ]
    name = f"{leaf}-{data.digest(depends)}.jsonl"
    if bench.sized:
        rows = data.cached(cache_dir / "data" / bench.name / name, samples, make)
        data_hash = data.digest([*depends, rows[0]])
    else:
        given = make(samples)
        content = [row for _, row in data.read_rows(given)] if isinstance(given, Path) else given
        rows, data_hash = content[:samples], data.digest([bench.version, content])
    return [data.complete(row, f"{leaf}, row {i}") for i, row in enumerate(rows)], data_hash


def _plain(text: str, gen_prefix: str, render: Any) -> str:
    """A prompt without few-shot examples, as lm-eval joins it."""
    if render is not None:
        messages = [{"role": "user", "content": text}]
        if gen_prefix:
            messages.append({"role": "assistant", "content": gen_prefix})
        rendered: str = render(messages, add_generation_prompt=not gen_prefix)
        return rendered
    gap = " " if gen_prefix and not (text[-1:].isspace() or gen_prefix[0].isspace()) else ""
    return text + gap + gen_prefix


def _chat(
    tokenizer: PreTrainedTokenizerBase,
    tokenizer_id: str,
    messages: list[dict[str, str]],
    add_generation_prompt: bool = True,
) -> str:
    """Apply the tokenizer's chat template; a started answer is left open."""
    if not tokenizer.chat_template:
        raise UserError(f"{tokenizer_id} has no chat template; run with --no-chat-template")
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    assert isinstance(text, str)
    return text


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


def _requests(built: Any, leaf: str, rows: Sequence[Doc], render: Any) -> list[Request]:
    """Build every prompt as `Task.build_all_requests` does, and part it at the sentinel."""
    shots = built.config.num_fewshot or 0
    built._instances = []
    parted: list[tuple[str, str]] = []
    for doc_id, doc in built.doc_iterator():
        prompt = built.fewshot_context(
            doc,
            num_fewshot=shots,
            apply_chat_template=render is not None,
            chat_template=render,
            gen_prefix=built.doc_to_prefix(doc),
        )
        # The examples bring the sentinel too: the last one parts context from question.
        *before, question = prompt.split(data.SENTINEL)
        if len(before) != shots + 1:
            raise UserError(
                f"{leaf}: doc_to_text of its YAML must hold {data.SENTINEL} once, between context "
                "and question"
            )
        built._instances.append(
            built.construct_requests(
                doc=doc, ctx=prompt, metadata=(leaf, doc_id, 1), apply_chat_template=bool(render)
            )
        )
        parted.append(("".join(before), question))
    order: dict[str, list[int]] = {}
    for i, (context, _) in enumerate(parted):
        order.setdefault(data.digest(context), []).append(i)
    requests = []
    for sample, (context_id, members) in enumerate(order.items()):
        for question_id, i in enumerate(members):
            requests.append(
                _request(built, leaf, rows[i], i, sample, question_id, context_id, parted[i])
            )
    return requests


def _request(
    built: Any,
    leaf: str,
    row: Doc,
    doc_id: int,
    sample: int,
    question_id: int,
    context_id: str,
    parts: tuple[str, str],
) -> Request:
    generation = built.config.generation_kwargs
    until = row.get("until")
    if until is None:
        until = generation.get("until") or []
    name = str(sample)
    if "depth" in row["extra"]:  # the result tables have no column for it; heat maps read it here
        name += f"-d{int(row['extra']['depth']):03d}"
    limit = row.get("max_new_tokens") or generation.get("max_gen_toks") or 256
    return Request(
        task=leaf,
        sample_id=name,
        doc_id=doc_id,
        question_id=question_id,
        context_id=context_id,
        context=parts[0],
        question=parts[1],
        until=(until,) if isinstance(until, str) else tuple(until),
        max_new_tokens=int(limit),
        target=tuple(row["outputs"]),
        extra=dict(row["extra"]),
    )


def _loaded(
    bench: Benchmark,
    leaf: str,
    length: int,
    data_hash: str,
    built: Any,
    rows: Sequence[Doc],
    requests: list[Request],
) -> LmEvalTask:
    metric, _, wanted = bench.metric.partition(",")
    known = list(built.aggregation())
    if metric not in known:
        raise UserError(f"{bench.name}: its YAML has no metric {metric!r}; it has {known}")
    filters = [f.name for f in built._filters]
    return LmEvalTask(
        name=leaf,
        group=bench.name,
        version="+".join([bench.version, *filter(None, [rows[0].get("variant")])]),
        data_hash=data_hash,
        metric=metric,
        higher_is_better=bool(built.higher_is_better()[metric]),
        chance=bench.chance,
        length=length,
        requests=requests,
        built=built,
        filter=wanted or filters[0],
        _ids={(r.sample_id, r.question_id): r.doc_id for r in requests},
        _instances=dict(enumerate(built.instances)),
    )
