"""Training data: sequences, and the positions in them that the gates learn from.

    reference                   samples of the reference model's own tasks, made on the fly
    chats                       made-up conversations about a text, made on the fly
    a task, as for --task       prompts of kvbench's tasks, with seeds that no evaluation uses
    ./mine.jsonl                lines with `text`, or with `context`, `question` and `answers`
    organisation/name           a data set of the hub

Several, separated by commas, take turns. Sequence `i` depends only on the data, the seed and `i`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor
from torch.utils.data import Dataset

from kvbench.errors import UserError
from kvbench.files import digest_of
from kvbench.harness.catalogue import resolve_task
from kvbench.harness.encode import split_encode
from kvbench.harness.rows import read_rows
from kvbench.named import lexicon_of
from kvbench.reference import samples
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.training import chats

Item = dict[str, Tensor]
"""`input_ids` int64 `[T]`, and `supervised` bool `[T]`: positions whose next token is learned.

With images, also what the model's forward takes for them, such as `pixel_values`.
"""

_RNG_KEY = 0x67617465
"""Separates the random numbers of these trainings from all others with the same seed."""

TOGETHER = 16
"""Sequences that are learned together, all of them in every pass over them."""

_TASK_SEEDS = 1_000_003
"""Added to `--seed` for kvbench's tasks; evaluations count their seeds from 0."""

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
"""Shares of the reference model's tasks."""


@dataclass(frozen=True)
class Stream:
    """An endless stream of sequences from one data set.

    Attributes:
        get: Returns sequence `i`, for any `i >= 0`.
        has_answers: Whether sequences have answers, so that only these are learned.
        facts: Description of the data for `gates.json`.
        size: Number of different sequences; None if there is no end to them.
    """

    get: Callable[[int], Item]
    has_answers: bool
    facts: Mapping[str, Any]
    size: int | None = None


class Sequences(Dataset[Item]):
    """The sequences of a training, in order.

    With several passes, `TOGETHER` sequences come as they are, then again in another order, and so
    on, before the next ones do.

    Args:
        streams: Streams, which take turns.
        count: Number of sequences, repetitions included.
        passes: How often each of them comes.
        seed: Seed of the order of repetitions.
    """

    def __init__(
        self, streams: Sequence[Stream], count: int, passes: int = 1, seed: int = 0
    ) -> None:
        self.streams = streams
        self.count = count
        self.passes = passes
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        group, place = divmod(index, self.passes * TOGETHER)
        turn, place = divmod(place, TOGETHER)
        if turn:
            order = np.random.default_rng([_RNG_KEY, self.seed, group, turn])
            place = int(order.permutation(TOGETHER)[place])
        return self._different(group * TOGETHER + place)

    def held_out(self, count: int) -> list[Item]:
        """Up to `count` sequences that come after those of the training, if there are any.

        The next row of a file replaces one that does not fit, so a later sequence can be one of the
        training; such sequences are left out.
        """
        first = different(self.count, self.passes)
        later = [
            self._different(i)
            for i in range(first, first + count)
            if i // len(self.streams) < (self.streams[i % len(self.streams)].size or i + 1)
        ]
        if not any(stream.size for stream in self.streams):  # made up, each of its own
            return later
        known = {tuple(self._different(i)["input_ids"]) for i in range(first)}
        return [item for item in later if tuple(item["input_ids"]) not in known]

    def _different(self, number: int) -> Item:
        return self.streams[number % len(self.streams)].get(number // len(self.streams))


def different(count: int, passes: int) -> int:
    """How many different sequences there are at most among `count`, repetitions included."""
    return count if passes == 1 else -(-count // (passes * TOGETHER)) * TOGETHER


def collate(items: Sequence[Item], pad: int = 0) -> Item:
    """Pad sequences on the left; the batch has `valid` only if there is padding.

    Images of all sequences follow one another.
    """
    longest = max(len(item["input_ids"]) for item in items)
    missing = [longest - len(item["input_ids"]) for item in items]
    batch = {
        name: torch.stack(
            [pad_tensor(x[name], (n, 0), value=fill) for x, n in zip(items, missing, strict=True)]
        )
        for name, fill in (("input_ids", pad), ("supervised", False))
    }
    for name in dict.fromkeys(name for item in items for name in item):
        if name not in batch:
            batch[name] = torch.cat([item[name] for item in items if name in item])
    if any(missing):
        batch["valid"] = torch.arange(longest) >= torch.tensor(missing)[:, None]
    return batch


def open_streams(
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
) -> list[Stream]:
    """Open training data.

    Args:
        spec: The data as described above, separated by commas.
        tokenizer: Tokenizer of the model.
        model: The model as `--model` names it.
        length: Maximum tokens of a sequence.
        count: Number of sequences of the training.
        seed: Seed of the order and of generated samples.
        split: Split of a hub data set.
        subset: Configuration of a hub data set.
        column: Column of the text; None for the first of the usual names.
        message: Called with lines for the user, such as tasks that are left out.

    Raises:
        UserError: There is no such data, or it does not fit the model or `length`.
    """
    names = [name.strip() for name in spec.split(",") if name.strip()]
    if not names:
        raise UserError("--data is empty; use reference, chats, a task, a JSONL file or a hub id")
    streams = []
    share = -(-count // len(names))
    for name in names:
        if name == "reference":
            streams.append(_reference(tokenizer, model, length, seed))
        elif name == "chats":
            streams.append(_chats(tokenizer, length, seed))
        elif name.endswith(".jsonl"):
            rows: Any = [row for _, row in read_rows(Path(name).expanduser())]
            streams.append(_rows(name, rows, tokenizer, length, seed, column))
        elif "/" in name:
            rows = _hub(name, split, subset)
            streams.append(_rows(name, rows, tokenizer, length, seed, column))
        else:
            streams.append(_task(name, tokenizer, model, length, share, seed, message))
    return streams


def _with_answer(prompt: Sequence[int], answer: Sequence[int]) -> Item:
    """A sequence; only its answer is learned."""
    ids = torch.tensor([*prompt, *answer])
    supervised = torch.zeros(len(ids), dtype=torch.bool)
    supervised[len(prompt) - 1 : len(ids) - 1] = True
    return {"input_ids": ids, "supervised": supervised}


def _answer_ids(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Token ids of an answer after a prompt."""
    space = "" if prompt[-1:].isspace() else " "
    return split_encode(tokenizer, prompt, space + answer)[1]


# --- the reference model's language ---------------------------------------------------------------


def _reference(tokenizer: Any, model: str, length: int, seed: int) -> Stream:
    if lexicon_of(tokenizer) != "reference":
        raise UserError(
            f"--data reference uses the words of the reference model, which {model} does not know; "
            "use other data"
        )
    if length < 96:
        raise UserError(f"--length {length} is too short for --data reference; use 96 or more")
    knobs = samples.Knobs(plural=12, spread=24, noise=0.2, plain_noise=0.6, full=0.2, fewest=1)
    tasks, shares = list(_MIX), np.array(list(_MIX.values()))

    def get(index: int) -> Item:
        rng = np.random.default_rng([_RNG_KEY, seed, index])
        (task,) = rng.choice(len(tasks), size=1, p=shares / shares.sum())
        words: list[str] = []
        supervised: list[bool] = []  # True for words of answers
        for part in samples.draw(rng, tasks[task], length, knobs).parts:
            prompt, answer = (part, []) if isinstance(part, list) else (part.prompt, part.answer)
            words += [*prompt, *answer]
            supervised += [False] * len(prompt) + [True] * len(answer)
        ids = torch.tensor([samples.IDS[word] for word in words])
        return {"input_ids": ids, "supervised": torch.tensor([*supervised[1:], False])}

    return Stream(get, True, {"data": "reference", "mix": _MIX})


def _chats(tokenizer: Any, length: int, seed: int) -> Stream:
    def get(index: int) -> Item:
        return chats.sequence(tokenizer, length, random.Random(f"{_RNG_KEY}-{seed}-{index}"))

    return Stream(get, True, chats.facts())


# --- kvbench's tasks ------------------------------------------------------------------------------


def _task(
    name: str,
    tokenizer: Any,
    model: str,
    length: int,
    count: int,
    seed: int,
    message: Callable[[str], None],
) -> Stream:
    grid = Grid.from_dict(
        {
            "tasks": name,
            "models": model,
            "policies": "full",
            "lengths": length,
            "samples": max(1, min(500, -(-count // len(resolve_task(name))))),
            "repeats": 1,
            "seed": _TASK_SEEDS + seed,
            "device": "cpu",
        }
    )
    (stage,) = plan(grid, message).stages
    prompts = [prompt for job in stage.jobs for prompt in job.prompts]
    order = np.random.default_rng([_RNG_KEY, seed]).permutation(len(prompts))

    def get(index: int) -> Item:
        prompt = prompts[int(order[index % len(prompts)])]
        request = prompt.request
        answer = request.answer or " ".join(request.target)
        answer_ids = _answer_ids(tokenizer, request.context + request.question, answer)
        item = _with_answer(prompt.ids, answer_ids)
        if prompt.media:
            assert stage.vision is not None
            item |= stage.vision.pixels(prompt.media, torch.device("cpu"))
        return item

    facts = {"data": name, "samples": len(prompts), "seed": grid.seed}
    return Stream(get, True, facts, len(prompts))


# --- rows of a file or of the hub -----------------------------------------------------------------


def _hub(name: str, split: str, subset: str | None) -> Any:
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = next((s for s in str(error).splitlines() if s.strip()), type(error).__name__)
        raise UserError(f"--data {name} cannot be loaded: {reason}") from None


_TEXT = ("text", "messages", "conversations", "content", "prompt")
_ANSWERED = ("context", "question", "answers")


def _rows(
    name: str, rows: Any, tokenizer: Any, length: int, seed: int, column: str | None
) -> Stream:
    """Rows in a seeded order, again and again; each is tokenised at its turn."""
    if not len(rows):
        raise UserError(f"--data {name} has no rows")
    first = rows[0]
    if not isinstance(first, Mapping):
        raise UserError(f"--data {name}: a row must be an object with named fields")
    has_answers = column is None and all(key in first for key in _ANSWERED)
    if column is None:
        column = next((key for key in _TEXT if key in first), None)
    if not has_answers and column not in first:
        raise UserError(
            f"--data {name} has the columns {', '.join(first)}; use rows with text, or with "
            "context, question and answers, or name the column with --text-column"
        )

    def encode(row: Mapping[str, Any]) -> Item | None:
        """A sequence; None if the row does not fit."""
        if has_answers:
            answers = row["answers"]
            answer = answers if isinstance(answers, str) else str(answers[0])
            text = str(row["context"]) + str(row["question"])
            item = _with_answer(_prompt_ids(tokenizer, text), _answer_ids(tokenizer, text, answer))
            return item if len(item["input_ids"]) <= length else None
        ids = _prompt_ids(tokenizer, _text(tokenizer, row[str(column)]))[:length]
        return _with_answer(ids[:1], ids[1:]) if len(ids) > 1 else None

    def get(index: int) -> Item:
        epoch, place = divmod(index, len(rows))
        order = np.random.default_rng([_RNG_KEY, seed, epoch]).permutation(len(rows))
        for step in range(len(rows)):  # the next row replaces one that does not fit
            item = encode(rows[int(order[(place + step) % len(rows)])])
            if item is not None:
                return item
        raise UserError(f"--data {name}: no row fits into --length {length}; use a larger one")

    content = digest_of(rows) if isinstance(rows, list) else getattr(rows, "_fingerprint", "")
    facts = {"data": name, "rows": len(rows), "content": str(content)}
    return Stream(get, has_answers, facts, len(rows))


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text without its end token, so that an answer can follow."""
    head, tail = split_encode(tokenizer, text, "")
    return head + tail


def _text(tokenizer: Any, value: Any) -> str:
    """A text, or a conversation in the chat template of the model."""
    if isinstance(value, str):
        return value
    turns = []
    for turn in value:
        role = str(turn.get("role", turn.get("from")))
        role = {"human": "user", "gpt": "assistant"}.get(role, role)
        turns.append({"role": role, "content": str(turn.get("content", turn.get("value", "")))})
    if tokenizer.chat_template is not None:
        text: str = tokenizer.apply_chat_template(turns, tokenize=False)
        return text
    return "\n\n".join(turn["content"] for turn in turns)
