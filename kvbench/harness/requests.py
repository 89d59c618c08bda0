"""From rows to requests: prompts as lm-eval builds them, split into context and question."""

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
    built: Any,
    leaf: str,
    rows: Sequence[Doc],
    places: Sequence[dialogue.Place | None],
    render: chat.Render | None,
    reporter: Reporter | None = None,
) -> Sequence[Request]:
    """Build every prompt as `Task.build_all_requests` does, and split it at the sentinel.

    Args:
        built: The task object of lm-eval.
        leaf: Its name.
        rows: Its documents.
        places: The place of each document in a dialogue.
        render: The chat template; None: no template.
        reporter: Told of every prompt, once that takes seconds.

    Raises:
        UserError: The YAML does not fit the rows.
    """
    shots = built.config.num_fewshot or 0
    if shots and any(places):
        raise UserError(f"{leaf}: a dialogue cannot have few-shot examples")
    parted: Spool[tuple[str, str]] = Spool()
    late = Late(reporter, len(rows), f"{leaf}: building prompts")
    for doc_id, doc in built.doc_iterator():
        place = places[doc_id]
        if place:
            history = place.messages(place.turn)
        else:
            history = chat.shot_messages(rows[doc_id].get("shots", ()))
        prompt = built.fewshot_context(
            doc,
            num_fewshot=shots,
            apply_chat_template=render is not None,
            fewshot_as_multiturn=render is not None,
            chat_template=render and chat.after(render, history),
            gen_prefix=built.doc_to_prefix(doc),
        )
        # Examples contain the sentinel, too: the last one separates context and question.
        *before, question = prompt.split(data.SENTINEL)
        if len(before) != shots + 1:
            raise UserError(
                f"{leaf}: doc_to_text in its YAML must contain {data.SENTINEL} exactly once, "
                "between context and question"
            )
        parted.append(("".join(before), question))
        late.advance()
    late.stop()
    if len({bool(row.get("given")) for row in rows}) > 1:
        raise UserError(f"{leaf}: either all rows or no row can have 'given'")
    media = [_media(leaf, number, row) for number, row in enumerate(rows)]
    asked = Asked(built.config.generation_kwargs, int(built.config.repeats or 1))
    return arranged(leaf, rows, places, parted, media, render, asked)


@dataclass(frozen=True)
class Asked:
    """What a task's YAML says about its answers.

    Attributes:
        kwargs: Its `generation_kwargs`.
        repeats: Number of answers to draw.
    """

    kwargs: Mapping[str, Any]
    repeats: int = 1


def arranged(
    leaf: str,
    rows: Sequence[Doc],
    places: Sequence[dialogue.Place | None],
    parted: Sequence[tuple[str, str]],
    media: Sequence[tuple[Medium, ...]],
    render: chat.Render | None,
    asked: Asked,
) -> Sequence[Request]:
    """Make requests of prompts: those of one context, or of one dialogue, become adjacent.

    Args:
        leaf: Name of the task.
        rows: Its documents.
        places: The place of each document in a dialogue.
        parted: Context and question of each.
        media: The images and videos of each; in a dialogue only those that its turn adds.
        render: The chat template; None: no template.
        asked: What the YAML says about the answers.
    """
    order: dict[str, list[int]] = {}
    for i, (place, (context, _)) in enumerate(zip(places, parted, strict=True)):
        key = f"dialogue {place.row}" if place else _context_id(context, media[i])
        order.setdefault(key, []).append(i)
    return kept(_arranged(leaf, rows, places, parted, media, render, asked, order))


def _arranged(
    leaf: str,
    rows: Sequence[Doc],
    places: Sequence[dialogue.Place | None],
    parted: Sequence[tuple[str, str]],
    media: Sequence[tuple[Medium, ...]],
    render: chat.Render | None,
    asked: Asked,
    order: Mapping[str, Sequence[int]],
) -> Iterator[Request]:
    """The requests in the order of their contexts; `order` has the rows of each."""
    for sample, (key, members) in enumerate(order.items()):
        joints: list[dialogue.Joint] = []
        turns = [place for i in members if (place := places[i])]
        if turns:
            joints = dialogue.joints(turns, [parted[i] for i in members], render, leaf)
            key = _context_id([*parted[members[-1]]], [m for i in members for m in media[i]])
        seen: tuple[Medium, ...] = ()
        for question_id, i in enumerate(members):
            made = _request(leaf, rows[i], i, sample, question_id, key, parted[i], asked)
            made = replace(made, media=media[i])
            if turns:
                joint = joints[question_id]
                seen += media[i]
                made = replace(
                    made,
                    dialogue=made.sample_id,
                    turn=question_id,
                    delta=joint.delta,
                    answer=turns[question_id].answer,
                    answer_begin=joint.answer_begin,
                    answer_end=joint.answer_end,
                    media=seen,
                    delta_media=media[i],
                )
            yield made


def _media(leaf: str, number: int, row: Mapping[str, Any]) -> tuple[Medium, ...]:
    """The images and videos of a row."""
    try:
        return tuple(map(medium, row.get("media", ())))
    except LeftOut:
        raise
    except UserError as error:
        raise UserError(f"{leaf}, row {number}: {error}") from None


def _context_id(text: object, media: Sequence[Medium]) -> str:
    """Hash of a context; two with the same text can have different images."""
    return data.digest([text, [one.digest for one in media]] if media else text)


def _request(
    leaf: str,
    row: Doc,
    doc_id: int,
    sample: int,
    question_id: int,
    context_id: str,
    parts: tuple[str, str],
    asked: Asked,
) -> Request:
    kwargs = asked.kwargs
    until = row.get("until")
    if until is None:
        until = kwargs.get("until") or []
    name = str(sample)
    if "depth" in row["extra"]:  # the result tables have no column for it; heat maps read it here
        name += f"-d{int(row['extra']['depth']):03d}"
    limit = row.get("max_new_tokens") or kwargs.get("max_gen_toks") or 256
    given = row.get("given") or ""
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
        sampling=None if given else from_yaml(kwargs, leaf),
        repeats=1 if given else asked.repeats,
        given=given,
    )
