"""Measure the reference model with its full cache: ``python -m kvbench.reference.evaluate``.

Each task is laid out as RULER does it (four needles, four values, chains of four hops among one
repeated sentence, ...) and asked once at the end of the context. The score is RULER's: the mean
share of the reference answers that the response contains. A response is decoded greedily up to
the first full stop.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvbench.reference import grammar, path, samples
from kvbench.reference.source import Source, Statement, interleave

LENGTHS = (512, 1024, 2048)
_ITEMS = {512: 16, 1024: 32, 2048: 48}
_COPIED = {512: 32, 1024: 64, 2048: 96}
_HOPS = 4
_KEYS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One prompt and what counts as its answer.

    Attributes:
        prompt: words, ``<bos>`` included; with the answer at most the length asked for.
        references: strings to look for in the response.
        answer: the exact answer, full stop included.
        any_order: whether the words of the answer may come in any order.
    """

    prompt: list[str]
    references: list[str]
    answer: list[str]
    any_order: bool = False


def _case(
    source: Source,
    length: int,
    statements: list[Statement],
    prompt: list[str],
    answer: list[str],
    references: list[str],
) -> Case:
    """Return a case with `statements` scattered in filler, so that all have the same length."""
    room = length - 1 - len(prompt) - len(answer)
    context = interleave(source, statements, room)
    return Case([grammar.BOS, *context, *prompt], references, answer)


def _needles(source: Source, length: int, count: int, key_size: int, value_size: int) -> Case:
    """Return a case of `count` needles, one of which is asked for."""
    words = source.reserve(count if key_size == 1 else min(300, max(8, count)))
    if key_size == 1:
        keys = [[word] for word in words]
    else:
        chosen = source.rng.permutation(len(words) ** 2)[:count].tolist()
        keys = [[words[n // len(words)], words[n % len(words)]] for n in chosen]
    statements, questions = samples.facts(source, keys, value_size)
    asked = questions[0]
    reference = " ".join(asked.answer[:-1])
    return _case(source, length, statements, asked.prompt, asked.answer, [reference])


def _multivalue(source: Source, length: int) -> Case:
    key = source.reserve(1)
    values = [source.free(2) for _ in range(4)]
    statements = [(float(n), grammar.needle(key, value)) for n, value in enumerate(values)]
    references = [" ".join(value) for value in values]
    return _case(source, length, statements, grammar.ask(key), grammar.answer(values), references)


def _multiquery(source: Source, length: int) -> Case:
    keys = source.reserve(_KEYS)
    statements, questions = samples.facts(source, [[key] for key in keys], 2)
    values = [question.answer[:-1] for question in questions]
    references = [" ".join(value) for value in values]
    answer = grammar.answer_each(keys, values)
    return _case(source, length, statements, grammar.ask_each(keys), answer, references)


def _chain(source: Source, length: int) -> Case:
    names = source.reserve(_HOPS + 2)
    statements = [
        (float(n), grammar.assign(a, b)) for n, (a, b) in enumerate(itertools.pairwise(names))
    ]
    answer = grammar.answer_words(names[1:])
    return _case(source, length, statements, grammar.ask_chain(names[0]), answer, names[1:])


def _list(source: Source, length: int) -> Case:
    values = [source.free(2) for _ in range(_ITEMS.get(length, length // 32))]
    statements = [
        (source.rng.random(), grammar.item(n, value)) for n, value in enumerate(values, 1)
    ]
    references = [" ".join([grammar.numeral(n), *value]) for n, value in enumerate(values, 1)]
    answer = grammar.answer_list(values)
    return _case(source, length, statements, grammar.ask_list(), answer, references)


def _copy(source: Source, length: int) -> Case:
    words = source.reserve(_COPIED.get(length, length // 16))
    statements: list[Statement] = [(0.0, grammar.passage(words))]
    answer = grammar.answer_words(words)
    return _case(source, length, statements, grammar.ask_copy(), answer, words)


def _drawn(task: str) -> Callable[[Source, int], Case]:
    """Return a maker that takes the last question of a training sample of `task`."""

    def make(source: Source, length: int) -> Case:
        parts = samples.draw(source.rng, task, length, samples.Knobs()).parts
        words: list[str] = []
        for part in parts[:-1]:
            words += part if isinstance(part, list) else part.prompt + part.answer
        last = parts[-1]
        if isinstance(last, list):
            raise ValueError(f"a sample of {task!r} does not end with a question")
        answer = last.answer
        references = [" ".join(answer[:-1])] if task == "dialogue" else answer[:-1]
        return Case([*words, *last.prompt], references, answer, last.any_order)

    return make


TASKS: dict[str, Callable[[Source, int], Case]] = {
    "single_1": lambda source, length: _needles(source, length, 1, 1, 2),
    "single_2": lambda source, length: _needles(source, length, 1, 1, 2),
    "single_3": lambda source, length: _needles(source, length, 1, 2, 4),
    "multikey_1": lambda source, length: _needles(source, length, _KEYS, 1, 2),
    "multikey_2": lambda source, length: _needles(source, length, min(400, length // 5 - 2), 1, 2),
    "multikey_3": lambda source, length: _needles(source, length, length // 8 - 2, 2, 4),
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "vt": _chain,
    "cwe": _drawn("cwe"),
    "fwe": _drawn("fwe"),
    "list": _list,
    "copy": _copy,
    "dialogue": _drawn("dialogue"),
}
_IN_NOISE = ("single_1", "vt")


def case(task: str, length: int, rng: np.random.Generator) -> Case:
    """Return a case of `task` for which prompt and answer are at most `length` words."""
    return TASKS[task](Source(rng, noise=float(task in _IN_NOISE)), length)


@torch.inference_mode()
def respond(model: PreTrainedModel, prompts: torch.Tensor, most: int) -> list[list[int]]:
    """Return greedy continuations of `prompts` (rows, tokens), each up to its first full stop.

    Args:
        model: the model.
        prompts: token ids, all rows of equal length.
        most: new tokens at most.
    """
    stop = samples.IDS[grammar.STOP]
    cache = DynamicCache(config=model.config)
    ids, steps = prompts, []
    open_rows = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
    for _ in range(most):
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        ids = out.logits[:, -1:].argmax(-1)
        steps.append(ids)
        open_rows &= ids[:, 0] != stop
        if not open_rows.any():
            break
    rows: list[list[int]] = torch.cat(steps, dim=1).tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def judge(case: Case, response: Sequence[str]) -> tuple[float, bool]:
    """Return RULER's score of `response` (words) and whether it is exactly right."""
    text = " ".join(response)
    found = [reference in text for reference in case.references]
    same = list(response) == case.answer
    if case.any_order:
        same = sorted(response) == sorted(case.answer)
    return sum(found) / len(found), same


def evaluate(
    model: PreTrainedModel,
    task: str,
    length: int,
    count: int,
    seed: int = 7,
    batch: int = 8,
) -> dict[str, float]:
    """Return the mean ``score`` and ``exact`` of `model` on `count` fresh samples of `task`."""
    results: list[tuple[float, bool]] = []
    by_size: dict[int, list[Case]] = {}
    for n in range(count):
        rng = np.random.default_rng([seed, length, list(TASKS).index(task), n])
        made = case(task, length, rng)
        by_size.setdefault(len(made.prompt), []).append(made)
    for cases in by_size.values():
        for first in range(0, len(cases), batch):
            some = cases[first : first + batch]
            ids = [[samples.IDS[word] for word in one.prompt] for one in some]
            most = max(len(one.answer) for one in some)
            responses = respond(model, torch.tensor(ids, device=model.device), most)
            for one, response in zip(some, responses, strict=True):
                results.append(judge(one, [grammar.VOCABULARY[token] for token in response]))
    scores, exact = zip(*results, strict=True)
    return {"score": float(np.mean(scores)), "exact": float(np.mean(exact))}


def main() -> None:
    """Run the command line: print a table, and with ``--json`` also write the figures."""
    parser = argparse.ArgumentParser(description="Evaluate the reference model, full cache.")
    parser.add_argument("--model", type=Path, default=path(), help="folder of the model")
    parser.add_argument("--samples", type=int, default=200, help="samples a task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="processor threads")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    if tokenizer.convert_ids_to_tokens(list(range(len(grammar.VOCABULARY)))) != list(
        grammar.VOCABULARY
    ):
        sys.exit(f"{options.model}: not a model of this vocabulary")
    model = AutoModelForCausalLM.from_pretrained(
        options.model, local_files_only=True, dtype=torch.float32
    ).eval()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    print("| task |" + "".join(f" {length} (exact) |" for length in options.lengths), flush=True)
    print("| --- |" + " --- |" * len(options.lengths))
    for task in options.tasks:
        row = {}
        for length in options.lengths:
            row[str(length)] = evaluate(model, task, length, options.samples, options.seed)
        figures[task] = row
        cells = "".join(f" {r['score']:.3f} ({r['exact']:.3f}) |" for r in row.values())
        print(f"| {task} |{cells}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
