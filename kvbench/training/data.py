"""What gates are trained on: sequences, and which of their positions are learned from.

    reference                   samples of the reference model's own tasks, made on the fly
    a task, as for --task       prompts of kvbench's tasks, of seeds that no evaluation uses
    ./mine.jsonl                lines with `text`, or with `context`, `question`, `answers`
    organisation/name           a data set of the hub

Several, with commas between, take turns. Sample `i` depends only on the data, the seed and `i`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.rows import digest, read_rows
from kvbench.named import lexicon_of

Item = dict[str, Tensor]
"""`input_ids` int64 `[T]`, and `asked` bool `[T]`: positions whose next token is learned from."""

_STREAM = 0x67617465
"""Parts the random numbers of this training from all others of the same seed."""

_TASK_SEEDS = 1_000_003
"""Added to `--seed` for kvbench's tasks: evaluations count their seeds from 0."""

_MIX = {
    "multikey": 0.2,
    "multivalue": 0.18,
    "vt": 0.14,
    "uuid": 0.1,
    "single": 0.08,
    "multiquery": 0.08,
    "mixed": 0.06,
    "list": 0.03,
    "copy": 0.02,
    "dialogue": 0.03,
    "cwe": 0.04,
    "fwe": 0.04,
}
"""Shares of the reference tasks."""


@dataclass(frozen=True)
class Source:
    """Where sequences come from.

    Attributes:
        get: Sequence `i`, for any `i >= 0`.
        answers: Whether sequences have answers, and only these are learned from.
        facts: What the log says of the data.
    """

    get: Callable[[int], Item]
    answers: bool
    facts: Mapping[str, Any]


class Sequences(Dataset[Item]):
    """The sequences of a run, in order.

    Args:
        sources: They take turns.
        count: How many sequences.
    """

    def __init__(self, sources: Sequence[Source], count: int) -> None:
        self.sources = sources
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        return self.sources[index % len(self.sources)].get(index // len(self.sources))


def collate(items: Sequence[Item], pad: int = 0) -> Item:
    """Pad sequences on the left; `valid` is given only where there is padding."""
    longest = max(len(item["input_ids"]) for item in items)
    short = [longest - len(item["input_ids"]) for item in items]
    ids = [
        torch.nn.functional.pad(item["input_ids"], (n, 0), value=pad)
        for n, item in zip(short, items, strict=True)
    ]
    asked = [
        torch.nn.functional.pad(item["asked"], (n, 0)) for n, item in zip(short, items, strict=True)
    ]
    batch = {"input_ids": torch.stack(ids), "asked": torch.stack(asked)}
    if any(short):
        batch["valid"] = torch.arange(longest) >= torch.tensor(short)[:, None]
    return batch


def sources(
    spec: str,
    tokenizer: Any,
    *,
    model: str,
    length: int,
    count: int,
    seed: int,
    split: str = "train",
    subset: str | None = None,
    column: str | None = None,
    message: Callable[[str], None] = lambda text: None,
) -> list[Source]:
    """Open data.

    Args:
        spec: As above, with commas between several.
        tokenizer: Of the model.
        model: What `--model` names.
        length: Tokens of a sequence, at most.
        count: Sequences that the run will take.
        seed: Of order and samples.
        split: Of a data set of the hub.
        subset: Its configuration.
        column: Where its text stands; None: the first of the usual names.
        message: Told what is left out.

    Raises:
        UserError: There is no such data, or nothing in it fits.
    """
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise UserError("--data is empty; reference, a task, a JSONL file or a hub id is right")
    found = []
    share = -(-count // len(names))
    for name in names:
        if name == "reference":
            found.append(_reference(tokenizer, model, length, seed))
        elif name.endswith(".jsonl"):
            rows = [row for _, row in read_rows(Path(name).expanduser())]
            found.append(_rows(name, rows, tokenizer, length, seed, column))
        elif "/" in name:
            rows = _hub(name, split, subset)
            found.append(_rows(name, rows, tokenizer, length, seed, column))
        else:
            found.append(_task(name, tokenizer, model, length, share, seed, message))
    return found


# --- the reference model's language ---------------------------------------------------------------


def _reference(tokenizer: Any, model: str, length: int, seed: int) -> Source:
    from kvbench.reference import samples

    if lexicon_of(tokenizer) != "reference":
        raise UserError(
            f"--data reference is in the words of the reference model, which {model} does not know"
        )
    if length < 96:
        raise UserError(f"--length {length}: 96 or more would be right for --data reference")
    knobs = samples.Knobs(plural=12, spread=24, noise=0.2, plain_noise=0.6, full=0.2, fewest=1)

    def get(index: int) -> Item:
        rng = np.random.default_rng([_STREAM, seed, index])
        batch = samples.batch(rng, 1, length, _MIX, knobs)
        ids = torch.from_numpy(batch.ids[0])
        used = int(ids.ne(0).nonzero().max()) + 1
        asked = torch.zeros(length, dtype=torch.bool)
        asked[torch.from_numpy(batch.positions)] = True
        return {"input_ids": ids[:used], "asked": asked[:used]}

    return Source(get, True, {"data": "reference", "mix": _MIX})


# --- kvbench's tasks ------------------------------------------------------------------------------


def _task(
    name: str,
    tokenizer: Any,
    model: str,
    length: int,
    count: int,
    seed: int,
    message: Callable[[str], None],
) -> Source:
    from kvbench.harness.catalogue import resolve_task
    from kvbench.runs.grid import Grid
    from kvbench.runs.planning import plan

    leaves = len(resolve_task(name))
    each = max(1, min(500, -(-count // leaves)))
    grid = Grid.from_dict(
        {
            "tasks": name,
            "models": model,
            "policies": "full",
            "lengths": length,
            "samples": each,
            "repeats": 1,
            "seed": _TASK_SEEDS + seed,
            "device": "cpu",
        }
    )
    (stage,) = plan(grid, message).stages
    rows = []
    for job in stage.jobs:
        for prompt in job.prompts:
            ask = prompt.request
            answer = ask.answer or " ".join(ask.target)
            text = ask.context + ask.question
            tail = _answer_ids(tokenizer, text, answer)
            rows.append(([*prompt.context_ids, *prompt.question_ids], tail))
    order = np.random.default_rng([_STREAM, seed]).permutation(len(rows))

    def get(index: int) -> Item:
        return _asked(*rows[order[index % len(rows)]])

    return Source(get, True, {"data": name, "samples": len(rows), "seed": grid.seed})


# --- rows of a file or of the hub -----------------------------------------------------------------


def _hub(name: str, split: str, subset: str | None) -> Any:
    import datasets

    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
        raise UserError(f"--data {name} cannot be loaded: {reason}") from None


_TEXT = ("text", "messages", "conversations", "content", "prompt")
_QUESTION = ("context", "question", "answers")


def _rows(
    name: str, rows: Any, tokenizer: Any, length: int, seed: int, column: str | None
) -> Source:
    """Rows in an order that the seed gives, again and again, each tokenised when its turn comes."""
    if not len(rows):
        raise UserError(f"--data {name} has no rows")
    first = rows[0]
    if not isinstance(first, Mapping):
        raise UserError(f"--data {name}: a row must be an object with named fields")
    answers = column is None and all(key in first for key in _QUESTION)
    if not answers and column is None:
        column = next((key for key in _TEXT if key in first), None)
    if not answers and (column is None or column not in first):
        raise UserError(
            f"--data {name} has {', '.join(first)}: text, or context, question and answers, would "
            "be right, or --text-column"
        )

    def encode(row: Mapping[str, Any]) -> Item | None:
        if answers:
            given = row["answers"]
            answer = given if isinstance(given, str) else str(given[0])
            text = str(row["context"]) + str(row["question"])
            head = _whole(tokenizer, text)
            tail = _answer_ids(tokenizer, text, answer)
            return _asked(head, tail) if len(head) + len(tail) <= length else None
        ids = _whole(tokenizer, _text(tokenizer, row[str(column)]))[:length]
        if len(ids) < 2:
            return None
        asked = torch.ones(len(ids), dtype=torch.bool)
        asked[-1] = False
        return {"input_ids": torch.tensor(ids), "asked": asked}

    def get(index: int) -> Item:
        turn, place = divmod(index, len(rows))
        order = np.random.default_rng([_STREAM, seed, turn]).permutation(len(rows))
        for step in range(len(rows)):  # what does not fit gives its turn to the next
            item = encode(rows[int(order[(place + step) % len(rows)])])
            if item is not None:
                return item
        raise UserError(f"--data {name}: no row fits into --length {length}; nothing is cut off")

    facts = {"data": name, "rows": len(rows)}
    if isinstance(rows, list):
        facts["content"] = digest(json.loads(json.dumps(rows)))
    else:
        facts["content"] = str(getattr(rows, "_fingerprint", ""))
    return Source(get, answers, facts)


def _text(tokenizer: Any, value: Any) -> str:
    """A text, or a conversation as the model's template writes it."""
    if isinstance(value, str):
        return value
    turns = [
        {
            "role": {"human": "user", "gpt": "assistant"}.get(
                str(turn.get("role", turn.get("from"))), str(turn.get("role", turn.get("from")))
            ),
            "content": str(turn.get("content", turn.get("value", ""))),
        }
        for turn in value
    ]
    if tokenizer.chat_template is not None:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
        return text
    return "\n\n".join(turn["content"] for turn in turns)


def _whole(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text that something may follow."""
    head, tail = split_encode(tokenizer, text, "")
    return head + tail


def _answer_ids(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Token ids of an answer, as they follow a prompt."""
    space = "" if prompt[-1:].isspace() else " "
    return split_encode(tokenizer, prompt, space + answer)[1]


def _asked(head: Sequence[int], tail: Sequence[int]) -> Item:
    """A prompt and its answer; only the answer is learned from."""
    ids = torch.tensor([*head, *tail])
    asked = torch.zeros(len(ids), dtype=torch.bool)
    asked[len(head) - 1 : len(ids) - 1] = True
    return {"input_ids": ids, "asked": asked}
