"""Texts of the analysis: task prompts with the model's answers, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.analysis.common import prompt_name, stages
from kvbench.benchmark import Medium
from kvbench.engine.loading import load_config, load_tokenizer, pick_device, pick_dtype
from kvbench.engine.pruning import prunes
from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.named import resolve_model
from kvbench.plugin import Policy
from kvbench.progress import Reporter
from kvbench.runs.grid import Grid
from kvbench.runs.planning import Stage

PARTS = ("context", "question", "answer")


@dataclass(frozen=True)
class Text:
    """Tokens of one text, before the model's answer.

    Attributes:
        sample_id: Sample and question number.
        context, question: Token ids.
        limit: Maximum tokens of the answer.
        until: Strings that end the answer.
        media: Images and videos of the context.
    """

    sample_id: str
    context: tuple[int, ...]
    question: tuple[int, ...] = ()
    limit: int = 0
    until: tuple[str, ...] = ()
    media: tuple[Medium, ...] = ()

    @property
    def tokens(self) -> int:
        """Number of tokens of context and question."""
        return len(self.context) + len(self.question)


@dataclass
class TextSource:
    """Texts of one task for one model.

    Attributes:
        stage: The model, with its device, dtype and tokenizer.
        task: Name of the task or the file.
        length: Length of the task's prompts; 0 for data of natural length.
        texts: The texts.
    """

    stage: Stage
    task: str
    length: int
    texts: list[Text] = field(default_factory=list)


def sources(grid: Grid, text_file: str | None, new_tokens: int | None, reporter: Reporter) -> list[TextSource]:
    """Tokenise the texts of a grid; the sources of one model are adjacent.

    Args:
        grid: Policies, models and tasks.
        text_file: A file to use instead of the tasks.
        new_tokens: Tokens that the model appends to each text; None for the task's limit.
        reporter: Receives messages about unavailable tasks.

    Raises:
        UserError: A value is unknown or out of range, or a policy has no files for a model.
    """
    if text_file is not None:
        return [_file_source(grid, model, Path(text_file), new_tokens or 0) for model in grid.models]
    task_sources = []
    for stage in stages(grid, reporter.message):
        for job in stage.jobs:
            source = TextSource(stage, job.task.name, job.task.length)
            for prompt in job.prompts:
                request = prompt.request
                token_limit = request.max_new_tokens if new_tokens is None else new_tokens
                source.texts.append(
                    Text(
                        prompt_name(prompt),
                        prompt.context_ids,
                        prompt.question_ids,
                        token_limit,
                        tuple(request.until),
                        prompt.media,
                    )
                )
            task_sources.append(source)
    return task_sources


def runnable(grid: Grid, model: str) -> dict[str, Policy]:
    """Return the evicting policies of a grid, by spelling.

    A policy included only by `all` is skipped if the model has no files for it.

    Raises:
        UserError: A named policy has no files for the model.
    """
    policies = {}
    for policy in grid.built_policies:
        try:
            policy.fingerprint(resolve_model(model))
        except UserError:
            if str(policy) in grid.named_policies:
                raise
            continue
        if policy.evicts and not prunes(policy):
            policies[str(policy)] = policy
    return policies


def _file_source(grid: Grid, model: str, path: Path, new_tokens: int) -> TextSource:
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not UTF-8 (byte {error.start})") from None
    if not content.strip():
        raise UserError(f"{path} contains no text")
    if grid.chat_template:
        raise UserError("--text uses no chat template; --chat-template needs --task")
    config = load_config(model, grid.revision).get_text_config()
    tokenizer = load_tokenizer(model, grid.revision)
    device = pick_device(grid.device, grid.device_map)
    stage = Stage(model, device, pick_dtype(grid.dtype, device), tokenizer, [])
    token_ids, _ = split_encode(tokenizer, content, "")
    if len(token_ids) < 2:
        raise UserError(f"{path}: the text has {len(token_ids)} tokens; it needs 2 or more")
    window = int(getattr(config, "max_position_embeddings", 0) or 0)
    if window and len(token_ids) + new_tokens > window:
        raise UserError(
            f"{path}: {len(token_ids) + new_tokens} tokens exceed the window of {window} of model "
            f"{model}; use a shorter text, because nothing is truncated"
        )
    return TextSource(stage, path.name, 0, [Text(path.stem, tuple(token_ids), (), new_tokens)])


def pieces(tokenizer: Any, token_ids: Sequence[int]) -> list[str]:
    """Return the text of every token, including spaces before words.

    A token that is not text by itself, such as part of a character, is given in the vocabulary's spelling.
    """
    decoded_texts: dict[tuple[int, ...], str] = {}

    def decode_tokens(*token_group: int) -> str:
        if token_group not in decoded_texts:
            decoded_texts[token_group] = tokenizer.decode(
                list(token_group), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        return decoded_texts[token_group]

    token_texts = []
    for position, token in enumerate(token_ids):
        token_text = decode_tokens(token)
        if position:  # a tokenizer may add spaces between tokens, or drop those before the first
            previous_text, joint_text = (
                decode_tokens(token_ids[position - 1]),
                decode_tokens(token_ids[position - 1], token),
            )
            token_text = joint_text[len(previous_text) :] if joint_text.startswith(previous_text) else token_text
        if not token_text or "\N{REPLACEMENT CHARACTER}" in token_text:
            token_text = str(tokenizer.convert_ids_to_tokens(token))
        token_texts.append(token_text)
    return token_texts


def token_label(tokenizer: Any, token: int) -> str:
    """Return a vocabulary token in quotes, with unprintable characters escaped."""
    return repr(pieces(tokenizer, [token])[0])
