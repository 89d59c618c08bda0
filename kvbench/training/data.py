"""Training data: sequences and the positions that the gates learn from.

    reference                   samples of the reference model's tasks, generated on the fly
    chats                       synthetic conversations about a text, generated on the fly
    a task, as for --task       prompts of kvbench's tasks, with seeds that no evaluation uses
    ./mine.jsonl                lines with `text`, or with `context`, `question` and `answers`
    organisation/name           a data set of the hub

Several sources, separated by commas, alternate. Sequence `i` depends only on the data, the seed and `i`.
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

With images, also the model's image inputs, such as `pixel_values`.
"""

_RNG_KEY = 0x67617465
"""Separates these random numbers from all others with the same seed."""

TOGETHER = 16
"""Number of consecutive sequences that are repeated together in several passes."""

_TASK_SEEDS = 1_000_003
"""Added to `--seed` for kvbench's tasks; evaluation seeds start at 0."""

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
"""Sampling weights of the reference model's tasks."""


@dataclass(frozen=True)
class SequenceStream:
    """An endless stream of sequences from one data set.

    Attributes:
        get: Returns sequence `i`, for any `i >= 0`.
        has_answers: Whether sequences have answers; if so, only these are learned.
        facts: Description of the data for `gates.json`.
        size: Number of distinct sequences; None if unlimited.
    """

    get: Callable[[int], Item]
    has_answers: bool
    facts: Mapping[str, Any]
    size: int | None = None


class Sequences(Dataset[Item]):
    """The sequences of a training run, in order.

    With several passes, `TOGETHER` sequences are repeated in a new order per pass before the next ones follow.

    Args:
        streams: Alternating streams.
        count: Number of sequences, including repetitions.
        passes: Number of times each sequence occurs.
        seed: Seed of the order of repetitions.
    """

    def __init__(self, streams: Sequence[SequenceStream], count: int, passes: int = 1, seed: int = 0) -> None:
        self.streams = streams
        self.count = count
        self.passes = passes
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        group_index, position = divmod(index, self.passes * TOGETHER)
        pass_index, position = divmod(position, TOGETHER)
        if pass_index:
            generator = np.random.default_rng([_RNG_KEY, self.seed, group_index, pass_index])
            position = int(generator.permutation(TOGETHER)[position])
        return self._different(group_index * TOGETHER + position)

    def held_out(self, max_count: int) -> list[Item]:
        """Return up to `max_count` sequences that follow the training sequences.

        A row that does not fit is replaced by the next row, so a later sequence may equal a training sequence; such
        sequences are excluded.
        """
        first_index = different(self.count, self.passes)
        later_items = [
            self._different(index)
            for index in range(first_index, first_index + max_count)
            if index // len(self.streams) < (self.streams[index % len(self.streams)].size or index + 1)
        ]
        if not any(stream.size for stream in self.streams):  # generated, all distinct
            return later_items
        training_ids = {tuple(self._different(index)["input_ids"]) for index in range(first_index)}
        return [item for item in later_items if tuple(item["input_ids"]) not in training_ids]

    def _different(self, index: int) -> Item:
        return self.streams[index % len(self.streams)].get(index // len(self.streams))


def different(total_count: int, passes: int) -> int:
    """Return the maximum number of distinct sequences among `total_count` with repetitions."""
    return total_count if passes == 1 else -(-total_count // (passes * TOGETHER)) * TOGETHER


def collate(batch_items: Sequence[Item], pad_token: int = 0) -> Item:
    """Pad sequences on the left; the batch has `valid` only if there is padding.

    Images of all sequences follow one another.
    """
    max_length = max(len(item["input_ids"]) for item in batch_items)
    padding_counts = [max_length - len(item["input_ids"]) for item in batch_items]
    batch = {
        field_name: torch.stack(
            [
                pad_tensor(sequence[field_name], (padding, 0), value=fill_value)
                for sequence, padding in zip(batch_items, padding_counts, strict=True)
            ]
        )
        for field_name, fill_value in (("input_ids", pad_token), ("supervised", False))
    }
    for field_name in dict.fromkeys(field_name for item in batch_items for field_name in item):
        if field_name not in batch:
            batch[field_name] = _joined([item[field_name] for item in batch_items if field_name in item])
    if any(padding_counts):
        batch["valid"] = torch.arange(max_length) >= torch.tensor(padding_counts)[:, None]
    return batch


def _joined(image_inputs: Sequence[Tensor]) -> Tensor:
    """Concatenate inputs of images, padded at the end as Mistral 3's processor pads images of different sizes."""
    sizes = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in image_inputs), strict=True)]
    padded = []
    for tensor in image_inputs:
        missing = [size - present for size, present in zip(sizes, tensor.shape[1:], strict=True)]
        padded.append(pad_tensor(tensor, [amount for count in reversed(missing) for amount in (0, count)]))
    return torch.cat(padded)


def open_streams(
    data_spec: str,
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
) -> list[SequenceStream]:
    """Open training data.

    Args:
        data_spec: The data as described above, separated by commas.
        tokenizer: Tokenizer of the model.
        model: The model as `--model` names it.
        length: Maximum tokens of a sequence.
        count: Number of sequences of the training.
        seed: Seed of order and generated samples.
        split: Split of a hub data set.
        subset: Configuration of a hub data set.
        column: Column of the text; None for the first of the usual names.
        message: Called with messages for the user, such as excluded tasks.

    Raises:
        UserError: The data does not exist, or does not fit the model or `length`.
    """
    data_names = [data_name.strip() for data_name in data_spec.split(",") if data_name.strip()]
    if not data_names:
        raise UserError("--data is empty; use reference, chats, a task, a JSONL file or a hub id")
    data_streams = []
    sequences_each = -(-count // len(data_names))
    for data_name in data_names:
        if data_name == "reference":
            data_streams.append(_reference(tokenizer, model, length, seed))
        elif data_name == "chats":
            data_streams.append(_chats(tokenizer, length, seed))
        elif data_name.endswith(".jsonl"):
            data_rows: Any = [data_row for _, data_row in read_rows(Path(data_name).expanduser())]
            data_streams.append(_rows(data_name, data_rows, tokenizer, length, seed, column))
        elif "/" in data_name:
            data_rows = _hub(data_name, split, subset)
            data_streams.append(_rows(data_name, data_rows, tokenizer, length, seed, column))
        else:
            data_streams.append(_task(data_name, tokenizer, model, length, sequences_each, seed, message))
    return data_streams


def _with_answer(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Item:
    """Return a sequence of which only the answer is learned."""
    token_ids = torch.tensor([*prompt_ids, *answer_ids])
    supervised = torch.zeros(len(token_ids), dtype=torch.bool)
    supervised[len(prompt_ids) - 1 : len(token_ids) - 1] = True
    return {"input_ids": token_ids, "supervised": supervised}


def _answer_ids(tokenizer: Any, prompt: str, answer: str) -> list[int]:
    """Return the token ids of an answer after a prompt."""
    separator = "" if prompt[-1:].isspace() else " "
    return split_encode(tokenizer, prompt, separator + answer)[1]


# --- the reference model's language ---------------------------------------------------------------


def _reference(tokenizer: Any, model: str, length: int, seed: int) -> SequenceStream:
    if lexicon_of(tokenizer) != "reference":
        raise UserError(
            f"--data reference needs the reference model's vocabulary, which {model} does not have; use other data"
        )
    if length < 96:
        raise UserError(f"--length {length} is too short for --data reference; use 96 or more")
    difficulty = samples.Knobs(plural=12, spread=24, noise=0.2, plain_noise=0.6, full=0.2, fewest=1)
    task_names, task_shares = list(_MIX), np.array(list(_MIX.values()))

    def get_item(index: int) -> Item:
        generator = np.random.default_rng([_RNG_KEY, seed, index])
        (task_index,) = generator.choice(len(task_names), size=1, p=task_shares / task_shares.sum())
        sequence_words: list[str] = []
        supervised: list[bool] = []  # True for answer words
        for segment in samples.draw(generator, task_names[task_index], length, difficulty).parts:
            prompt_words, answer_words = (
                (segment, []) if isinstance(segment, list) else (segment.prompt, segment.answer)
            )
            sequence_words += [*prompt_words, *answer_words]
            supervised += [False] * len(prompt_words) + [True] * len(answer_words)
        token_ids = torch.tensor([samples.IDS[vocabulary_word] for vocabulary_word in sequence_words])
        return {"input_ids": token_ids, "supervised": torch.tensor([*supervised[1:], False])}

    return SequenceStream(get_item, True, {"data": "reference", "mix": _MIX})


def _chats(tokenizer: Any, length: int, seed: int) -> SequenceStream:
    def get_item(index: int) -> Item:
        return chats.sequence(tokenizer, length, random.Random(f"{_RNG_KEY}-{seed}-{index}"))

    return SequenceStream(get_item, True, chats.facts())


# --- kvbench's tasks ------------------------------------------------------------------------------


def _task(
    task_name: str,
    tokenizer: Any,
    model: str,
    length: int,
    sequence_count: int,
    seed: int,
    message: Callable[[str], None],
) -> SequenceStream:
    grid = Grid.from_dict(
        {
            "tasks": task_name,
            "models": model,
            "policies": "full",
            "lengths": length,
            "samples": max(1, min(500, -(-sequence_count // len(resolve_task(task_name))))),
            "repeats": 1,
            "seed": _TASK_SEEDS + seed,
            "device": "cpu",
        }
    )
    (stage,) = plan(grid, message).stages
    prompts = [prompt for job in stage.jobs for prompt in job.prompts]
    if any(prompt.branches for prompt in prompts):
        raise UserError(f"{task_name} measures texts and asks for no answer; train on a task with answers")
    shuffled_order = np.random.default_rng([_RNG_KEY, seed]).permutation(len(prompts))

    def get_item(index: int) -> Item:
        prompt = prompts[int(shuffled_order[index % len(prompts)])]
        request = prompt.request
        answer_text = request.answer or " ".join(request.target)
        answer_ids = _answer_ids(tokenizer, request.context + request.question, answer_text)
        sequence = _with_answer(prompt.ids, answer_ids)
        if prompt.media:
            assert stage.vision is not None
            sequence |= stage.vision.pixels(prompt.media, torch.device("cpu"))
        return sequence

    data_facts = {"data": task_name, "samples": len(prompts), "seed": grid.seed}
    return SequenceStream(get_item, True, data_facts, len(prompts))


# --- rows of a file or of the hub -----------------------------------------------------------------


def _hub(dataset_name: str, split: str, subset: str | None) -> Any:
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(dataset_name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        reason = next(
            (error_line for error_line in str(error).splitlines() if error_line.strip()),
            type(error).__name__,
        )
        raise UserError(f"--data {dataset_name} cannot be loaded: {reason}") from None


_TEXT = ("text", "messages", "conversations", "content", "prompt")
_ANSWERED = ("context", "question", "answers")


def _rows(
    source: str, dataset_rows: Any, tokenizer: Any, length: int, seed: int, text_column: str | None
) -> SequenceStream:
    """Stream rows in a seeded order, endlessly; each is tokenised on access."""
    if not len(dataset_rows):
        raise UserError(f"--data {source} has no rows")
    first_row = dataset_rows[0]
    if not isinstance(first_row, Mapping):
        raise UserError(f"--data {source}: a row must be an object with named fields")
    has_answers = text_column is None and all(column_name in first_row for column_name in _ANSWERED)
    if text_column is None:
        text_column = next((column_name for column_name in _TEXT if column_name in first_row), None)
    if not has_answers and text_column not in first_row:
        raise UserError(
            f"--data {source} has the columns {', '.join(first_row)}; use rows with text, or with "
            "context, question and answers, or name the column with --text-column"
        )

    def encode_row(data_row: Mapping[str, Any]) -> Item | None:
        """Return a sequence, or None if the row does not fit."""
        if has_answers:
            row_answers = data_row["answers"]
            answer_text = row_answers if isinstance(row_answers, str) else str(row_answers[0])
            prompt_text = str(data_row["context"]) + str(data_row["question"])
            sequence = _with_answer(
                _prompt_ids(tokenizer, prompt_text),
                _answer_ids(tokenizer, prompt_text, answer_text),
            )
            return sequence if len(sequence["input_ids"]) <= length else None
        token_ids = _prompt_ids(tokenizer, _text(tokenizer, data_row[str(text_column)]))[:length]
        return _with_answer(token_ids[:1], token_ids[1:]) if len(token_ids) > 1 else None

    def get_item(index: int) -> Item:
        epoch, position = divmod(index, len(dataset_rows))
        row_order = np.random.default_rng([_RNG_KEY, seed, epoch]).permutation(len(dataset_rows))
        for offset in range(len(dataset_rows)):  # the next row replaces one that does not fit
            sequence = encode_row(dataset_rows[int(row_order[(position + offset) % len(dataset_rows)])])
            if sequence is not None:
                return sequence
        raise UserError(f"--data {source}: no row fits into --length {length}; use a larger one")

    content_digest = (
        digest_of(dataset_rows) if isinstance(dataset_rows, list) else getattr(dataset_rows, "_fingerprint", "")
    )
    data_facts = {"data": source, "rows": len(dataset_rows), "content": str(content_digest)}
    return SequenceStream(get_item, has_answers, data_facts, len(dataset_rows))


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of a text without its end token, so that an answer can follow."""
    leading_ids, trailing_ids = split_encode(tokenizer, text, "")
    return leading_ids + trailing_ids


def _text(tokenizer: Any, content: Any) -> str:
    """Return a text, or a conversation rendered with the model's chat template."""
    if isinstance(content, str):
        return content
    chat_turns = []
    for chat_turn in content:
        role = str(chat_turn.get("role", chat_turn.get("from")))
        role = {"human": "user", "gpt": "assistant"}.get(role, role)
        chat_turns.append({"role": role, "content": str(chat_turn.get("content", chat_turn.get("value", "")))})
    if tokenizer.chat_template is not None:
        rendered: str = tokenizer.apply_chat_template(chat_turns, tokenize=False)
        return rendered
    return "\n\n".join(chat_turn["content"] for chat_turn in chat_turns)
