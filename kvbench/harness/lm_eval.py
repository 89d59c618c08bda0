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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError
from kvbench.harness import chat, data, dialogue
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
        render = partial(chat.chat, tokenizer, tokenizer_id) if chat_template else None
        rows, data_hash = _rows(
            bench, leaf, length, samples, seed, tokenizer, lexicon, render, Path(cache_dir)
        )
        docs, places = dialogue.flat(rows, render is not None)
        with _quiet():
            built = _build(bench, leaf, docs, seed)
            requests = _requests(built, leaf, docs, places, render)
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


def _requests(
    built: Any,
    leaf: str,
    rows: Sequence[Doc],
    places: Sequence[dialogue.Place | None],
    render: chat.Render | None,
) -> list[Request]:
    """Build every prompt as `Task.build_all_requests` does, and part it at the sentinel."""
    shots = built.config.num_fewshot or 0
    if shots and any(places):
        raise UserError(f"{leaf}: a dialogue can have no few-shot examples")
    built._instances = []
    parted: list[tuple[str, str]] = []
    for doc_id, doc in built.doc_iterator():
        place = places[doc_id]
        prompt = built.fewshot_context(
            doc,
            num_fewshot=shots,
            apply_chat_template=render is not None,
            chat_template=dialogue.after(render, place) if render and place else render,
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
    for i, (place, (context, _)) in enumerate(zip(places, parted, strict=True)):
        key = f"dialogue {place.row}" if place else data.digest(context)
        order.setdefault(key, []).append(i)
    requests = []
    for sample, (key, members) in enumerate(order.items()):
        joints: list[dialogue.Joint] = []
        turns = [place for i in members if (place := places[i])]
        if turns:
            joints = dialogue.joints(turns, [parted[i] for i in members], render, leaf)
            key = data.digest([*parted[members[-1]]])
        for question_id, i in enumerate(members):
            made = _request(built, leaf, rows[i], i, sample, question_id, key, parted[i])
            if turns:
                joint = joints[question_id]
                made = replace(
                    made,
                    dialogue=made.sample_id,
                    turn=question_id,
                    delta=joint.delta,
                    answer=turns[question_id].answer,
                    answer_begin=joint.answer_begin,
                    answer_end=joint.answer_end,
                )
            requests.append(made)
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
