"""Conversion of rows to requests: prompts as lm-eval builds them, split into context and question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvbench.benchmark import Doc, Medium
from kvbench.data.media import medium
from kvbench.data.spool import Spool
from kvbench.decoding import from_yaml
from kvbench.errors import LeftOut, UserError
from kvbench.harness import chat, dialogue
from kvbench.harness import rows as data
from kvbench.harness.protocol import Request, kept
from kvbench.progress import Late, Reporter


def requests(
    harness_task: Any,
    task_name: str,
    rows: Sequence[Doc],
    positions: Sequence[dialogue.PromptPosition | None],
    render: chat.Render | None,
    reporter: Reporter | None = None,
    max_frames: int | None = None,
) -> Sequence[Request]:
    """Build every prompt as `Task.build_all_requests` does, and split it at the sentinel.

    Args:
        harness_task: The task object of lm-eval.
        rows: Its documents.
        positions: Position of each document in a dialogue.
        render: The chat template; None: no template.
        reporter: Progress reporter, used once building takes seconds.
        max_frames: See `kvbench.data.media.medium`.

    Raises:
        UserError: The YAML does not fit the rows.
    """
    shot_count = harness_task.config.num_fewshot or 0
    if shot_count and any(positions):
        raise UserError(f"{task_name}: a dialogue cannot have few-shot examples")
    prompt_parts: Spool[tuple[str, str]] = Spool()
    progress = Late(reporter, len(rows), f"{task_name}: building prompts")
    for doc_id, document in harness_task.doc_iterator():
        position = positions[doc_id]
        if position:
            history = position.messages(position.turn)
        else:
            history = chat.shot_messages(rows[doc_id].get("shots", ()))
        prompt = harness_task.fewshot_context(
            document,
            num_fewshot=shot_count,
            apply_chat_template=render is not None,
            fewshot_as_multiturn=render is not None,
            chat_template=render and chat.after(render, history),
            gen_prefix=harness_task.doc_to_prefix(document),
        )
        # Examples contain the sentinel too; the last one separates context and question.
        *context_parts, question = prompt.split(data.SENTINEL)
        if len(context_parts) != shot_count + 1:
            raise UserError(
                f"{task_name}: doc_to_text in its YAML must contain {data.SENTINEL} exactly once, "
                "between context and question"
            )
        prompt_parts.append(("".join(context_parts), question))
        progress.advance()
    progress.stop()
    if len({bool(row.get("given")) for row in rows}) > 1:
        raise UserError(f"{task_name}: either all rows or no row can have 'given'")
    row_media = [_media(task_name, row_index, row, max_frames) for row_index, row in enumerate(rows)]
    question_settings = AnswerSettings(harness_task.config.generation_kwargs, int(harness_task.config.repeats or 1))
    return arranged(task_name, rows, positions, prompt_parts, row_media, render, question_settings)


@dataclass(frozen=True)
class AnswerSettings:
    """Generation settings in a task's YAML.

    Attributes:
        kwargs: Its `generation_kwargs`.
        repeats: Number of answers to sample.
    """

    kwargs: Mapping[str, Any]
    repeats: int = 1


def arranged(
    task_name: str,
    rows: Sequence[Doc],
    positions: Sequence[dialogue.PromptPosition | None],
    prompt_parts: Sequence[tuple[str, str]],
    media: Sequence[tuple[Medium, ...]],
    render: chat.Render | None,
    question_settings: AnswerSettings,
) -> Sequence[Request]:
    """Create requests from prompts, with those of one context or dialogue adjacent.

    Args:
        rows: Its documents.
        positions: Position of each document in a dialogue.
        prompt_parts: Context and question of each.
        media: The images and videos of each; in a dialogue only those that its turn adds.
        render: The chat template; None: no template.
        question_settings: Generation settings of the YAML.
    """
    groups: dict[str, list[int]] = {}
    for request_index, (position, (context, _)) in enumerate(zip(positions, prompt_parts, strict=True)):
        group_key = f"dialogue {position.row}" if position else _context_id(context, media[request_index])
        groups.setdefault(group_key, []).append(request_index)
    return kept(_arranged(task_name, rows, positions, prompt_parts, media, render, question_settings, groups))


def _arranged(
    task_name: str,
    rows: Sequence[Doc],
    positions: Sequence[dialogue.PromptPosition | None],
    prompt_parts: Sequence[tuple[str, str]],
    media: Sequence[tuple[Medium, ...]],
    render: chat.Render | None,
    question_settings: AnswerSettings,
    groups: Mapping[str, Sequence[int]],
) -> Iterator[Request]:
    """Yield the requests in the order of their contexts; `groups` has the rows of each."""
    for sample_index, (group_key, member_indices) in enumerate(groups.items()):
        joints: list[dialogue.Joint] = []
        dialogue_turns = [position for request_index in member_indices if (position := positions[request_index])]
        if dialogue_turns:
            joints = dialogue.joints(
                dialogue_turns,
                [prompt_parts[request_index] for request_index in member_indices],
                render,
                task_name,
            )
            group_key = _context_id(
                [*prompt_parts[member_indices[-1]]],
                [turn_medium for request_index in member_indices for turn_medium in media[request_index]],
            )
        seen_media: tuple[Medium, ...] = ()
        for question_id, request_index in enumerate(member_indices):
            request = _request(
                task_name,
                rows[request_index],
                request_index,
                sample_index,
                question_id,
                group_key,
                prompt_parts[request_index],
                question_settings,
            )
            request = replace(request, media=media[request_index])
            if dialogue_turns:
                joint = joints[question_id]
                seen_media += media[request_index]
                request = replace(
                    request,
                    dialogue=request.sample_id,
                    turn=question_id,
                    delta=joint.delta,
                    answer=dialogue_turns[question_id].answer,
                    answer_begin=joint.answer_begin,
                    answer_end=joint.answer_end,
                    media=seen_media,
                    delta_media=media[request_index],
                )
            yield request


def _media(task_name: str, row_number: int, row: Mapping[str, Any], max_frames: int | None) -> tuple[Medium, ...]:
    """Return the images and videos of a row."""
    try:
        return tuple(medium(entry, max_frames) for entry in row.get("media", ()))
    except LeftOut:
        raise
    except UserError as error:
        raise UserError(f"{task_name}, row {row_number}: {error}") from None


def _context_id(content: object, media: Sequence[Medium]) -> str:
    """Return the hash of a context, including its media."""
    return data.digest([content, [item.digest for item in media]] if media else content)


def _request(
    task_name: str,
    row: Doc,
    doc_id: int,
    sample_index: int,
    question_id: int,
    context_id: str,
    prompt_parts: tuple[str, str],
    question_settings: AnswerSettings,
) -> Request:
    generation_kwargs = question_settings.kwargs
    stop_texts = row.get("until")
    if stop_texts is None:
        stop_texts = generation_kwargs.get("until") or []
    sample_id = str(sample_index)
    if "depth" in row["extra"]:  # the result tables have no depth column, so heat maps read it here
        sample_id += f"-d{int(row['extra']['depth']):03d}"
    token_limit = row.get("max_new_tokens") or generation_kwargs.get("max_gen_toks") or 256
    given_answer = row.get("given") or ""
    return Request(
        task=task_name,
        sample_id=sample_id,
        doc_id=doc_id,
        question_id=question_id,
        context_id=context_id,
        context=prompt_parts[0],
        question=prompt_parts[1],
        until=(stop_texts,) if isinstance(stop_texts, str) else tuple(stop_texts),
        max_new_tokens=int(token_limit),
        target=tuple(row["outputs"]),
        extra=dict(row["extra"]),
        sampling=None if given_answer else from_yaml(generation_kwargs, task_name),
        repeats=1 if given_answer else question_settings.repeats,
        given=given_answer,
    )
