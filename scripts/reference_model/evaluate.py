"""Measure the reference model with its full cache.

    python -m scripts.reference_model.evaluate

Tasks follow RULER (four needles, four values, chains of four hops in one repeated sentence, ...),
with one question at the end of the context. The score is RULER's: the mean share of the reference
answers that the response contains. Responses are decoded greedily up to the first full stop.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from kvbench.reference import grammar, path, samples
from kvbench.reference.pool import Statement, WordPool, interleave

LENGTHS = (512, 1024, 2048)
_ITEMS = {512: 16, 1024: 32, 2048: 48}
_COPIED = {512: 32, 1024: 64, 2048: 96}
_HOPS = 4
_KEYS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt and its answer.

    Attributes:
        prompt: Words, including ``<bos>``.
        references: Strings to look for in the response.
        answer: The exact answer, with its full stop.
        any_order: Whether the words of the answer may come in any order.
    """

    prompt: list[str]
    references: list[str]
    answer: list[str]
    any_order: bool = False


def _case(
    pool: WordPool,
    length: int,
    statements: list[Statement],
    prompt: list[str],
    answer: list[str],
    references: list[str],
) -> Case:
    """Scatter `statements` in filler, so that prompt and answer have `length` words."""
    room = length - 1 - len(prompt) - len(answer)
    context = interleave(pool, statements, room)
    return Case([grammar.BOS, *context, *prompt], references, answer)


def _needles(pool: WordPool, length: int, count: int, key_size: int, value_size: int) -> Case:
    """Make a case of `count` needles, with a question about one of them."""
    words = pool.reserve(count if key_size == 1 else min(300, max(8, count)))
    if key_size == 1:
        keys = [[word] for word in words]
    else:
        chosen = pool.rng.permutation(len(words) ** 2)[:count].tolist()
        keys = [[words[n // len(words)], words[n % len(words)]] for n in chosen]
    statements, questions = samples.facts(pool, keys, value_size)
    prompt, answer = questions[0].prompt, questions[0].answer
    return _case(pool, length, statements, prompt, answer, [" ".join(answer[:-1])])


def _multivalue(pool: WordPool, length: int) -> Case:
    key = pool.reserve(1)
    values = [pool.free(2) for _ in range(4)]
    statements = [(float(n), grammar.needle(key, value)) for n, value in enumerate(values)]
    references = [" ".join(value) for value in values]
    return _case(pool, length, statements, grammar.ask(key), grammar.answer(values), references)


def _multiquery(pool: WordPool, length: int) -> Case:
    keys = pool.reserve(_KEYS)
    statements, questions = samples.facts(pool, [[key] for key in keys], 2)
    values = [question.answer[:-1] for question in questions]
    references = [" ".join(value) for value in values]
    answer = grammar.answer_each(keys, values)
    return _case(pool, length, statements, grammar.ask_each(keys), answer, references)


def _chain(pool: WordPool, length: int) -> Case:
    names = pool.reserve(_HOPS + 2)
    statements = [(float(n), grammar.assign(a, b)) for n, (a, b) in enumerate(itertools.pairwise(names))]
    answer = grammar.answer_words(names[1:])
    return _case(pool, length, statements, grammar.ask_chain(names[0]), answer, names[1:])


def _list(pool: WordPool, length: int) -> Case:
    values = [pool.free(2) for _ in range(_ITEMS.get(length, length // 32))]
    statements = [(pool.rng.random(), grammar.item(n, value)) for n, value in enumerate(values, 1)]
    references = [" ".join([grammar.numeral(n), *value]) for n, value in enumerate(values, 1)]
    answer = grammar.answer_list(values)
    return _case(pool, length, statements, grammar.ask_list(), answer, references)


def _copy(pool: WordPool, length: int) -> Case:
    words = pool.reserve(_COPIED.get(length, length // 16))
    statements: list[Statement] = [(0.0, grammar.passage(words))]
    answer = grammar.answer_words(words)
    return _case(pool, length, statements, grammar.ask_copy(), answer, words)


def _drawn(task: str) -> Callable[[WordPool, int], Case]:
    """Make cases of `task` from training samples, with the last question as the question."""

    def make(pool: WordPool, length: int) -> Case:
        parts = samples.draw(pool.rng, task, length, samples.Knobs()).parts
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


TASKS: dict[str, Callable[[WordPool, int], Case]] = {
    "single_1": lambda pool, length: _needles(pool, length, 1, 1, 2),
    "single_2": lambda pool, length: _needles(pool, length, 1, 1, 2),
    "single_3": lambda pool, length: _needles(pool, length, 1, 2, 4),
    "multikey_1": lambda pool, length: _needles(pool, length, _KEYS, 1, 2),
    "multikey_2": lambda pool, length: _needles(pool, length, min(400, length // 5 - 2), 1, 2),
    "multikey_3": lambda pool, length: _needles(pool, length, length // 8 - 2, 2, 4),
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
    """Make a case of `task`; prompt and answer together have at most `length` words."""
    return TASKS[task](WordPool(rng, noise=float(task in _IN_NOISE)), length)


def respond(model: PreTrainedModel, prompts: torch.Tensor, limit: int) -> list[list[int]]:
    """Continue prompts greedily, each up to its first full stop.

    Args:
        model: The model.
        prompts: Token ids, `[rows, length]`, without padding.
        limit: Maximum number of new tokens.
    """
    stop = samples.IDS[grammar.STOP]
    generator: Any = model  # transformers types `generate` as a tensor
    responses = generator.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
    )
    rows: list[list[int]] = responses[:, prompts.shape[1] :].tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def judge(case: Case, response: Sequence[str]) -> tuple[float, bool]:
    """Return RULER's score of a response (words) and whether it equals the answer."""
    text = " ".join(response)
    score = sum(reference in text for reference in case.references) / len(case.references)
    if case.any_order:
        return score, sorted(response) == sorted(case.answer)
    return score, list(response) == case.answer


def evaluate(
    model: PreTrainedModel,
    task: str,
    length: int,
    count: int,
    seed: int = 7,
    batch: int = 8,
) -> dict[str, float]:
    """Measure the mean `score` and the share of `exact` answers on `count` samples of `task`."""
    results: list[tuple[float, bool]] = []
    by_size: dict[int, list[Case]] = {}
    for n in range(count):
        rng = np.random.default_rng([seed, length, list(TASKS).index(task), n])
        sampled = case(task, length, rng)
        by_size.setdefault(len(sampled.prompt), []).append(sampled)
    for cases in by_size.values():
        for first in range(0, len(cases), batch):
            batch_cases = cases[first : first + batch]
            ids = [[samples.IDS[word] for word in each.prompt] for each in batch_cases]
            limit = max(len(each.answer) for each in batch_cases)
            responses = respond(model, torch.tensor(ids, device=model.device), limit)
            for each, response in zip(batch_cases, responses, strict=True):
                results.append(judge(each, [grammar.VOCABULARY[token] for token in response]))
    scores, exact = zip(*results, strict=True)
    return {"score": float(np.mean(scores)), "exact": float(np.mean(exact))}


def main() -> None:
    """Print the table; with `--json`, also write the figures to a file."""
    parser = argparse.ArgumentParser(description="Measure the reference model with its full cache.")
    parser.add_argument("--model", type=Path, default=path(), help="folder of the model")
    parser.add_argument("--samples", type=int, default=200, help="samples per task and length")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=None, help="processor threads")
    parser.add_argument("--json", type=Path, default=None, help="file for the figures")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    if tokenizer.convert_ids_to_tokens(list(range(len(grammar.VOCABULARY)))) != list(grammar.VOCABULARY):
        sys.exit(f"{options.model}: its vocabulary is not that of the reference model")
    model = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True, dtype=torch.float32).eval()
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
