"""Dialogues: a row with `turns` becomes one prompt per turn, each with the history before it.

The history contains the reference answers. With a chat template its turns are real messages;
without one the row's `frame` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.benchmark import Doc
from kvbench.data.spool import Spool
from kvbench.errors import UserError, quoted
from kvbench.harness import rows as data
from kvbench.harness.chat import Message, Render, shot_text

_FRAME = ("user", "assistant", "end")


@dataclass(frozen=True)
class Place:
    """The place of a prompt in the rows of a task.

    Attributes:
        row: Index of its row.
        turn: Number of its turn.
        row_turns: All turns of the row.
        frame: Frame of the row.
    """

    row: int
    turn: int
    row_turns: Sequence[Doc]
    frame: Mapping[str, str]

    @property
    def answer(self) -> str:
        """The reference answer."""
        answer: str = self.row_turns[self.turn]["answer"]
        return answer

    def messages(self, turns: int) -> list[Message]:
        """The first turns of the dialogue, with answers, as chat messages."""
        made: list[Message] = []
        for turn in self.row_turns[:turns]:
            made.append({"role": "user", "content": turn["context"] + turn["question"]})
            made.append({"role": "assistant", "content": turn["answer"]})
        return made


@dataclass(frozen=True)
class Joint:
    """The fields of `Request` about a turn's place in its dialogue; see there."""

    delta: str
    answer_begin: str
    answer_end: str


def is_dialogue(row: Mapping[str, Any]) -> bool:
    """Whether a row of data is a dialogue."""
    return "turns" in row


def complete(row: Mapping[str, Any], where: str) -> Doc:
    """Check a dialogue and fill in the optional fields of its turns; see `Benchmark.docs`.

    Raises:
        UserError: A field is missing, has the wrong type or contains the sentinel.
    """
    turns, frame = row["turns"], row.get("frame")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: 'turns' must be a list of at least one turn")
    if not isinstance(frame, Mapping) or not all(isinstance(frame.get(f), str) for f in _FRAME):
        raise UserError(f"{where}: 'frame' must have the texts {', '.join(_FRAME)}")
    if any(data.SENTINEL in frame[name] for name in _FRAME):
        raise UserError(f"{where}: the data must not contain {data.SENTINEL}")
    made = []
    for number, turn in enumerate(turns):
        name = f"{where}, turn {number}"
        if not isinstance(turn, Mapping):
            raise UserError(f"{name}: a turn must be an object")
        full = data.complete({**_common(row), **turn}, name)
        answer = full.get("answer")
        if not isinstance(answer, str) or not answer or answer != answer.strip():
            raise UserError(f"{name}: 'answer' must be a text without white space at either end")
        if full["gen_prefix"]:
            raise UserError(f"{name}: a dialogue cannot have a 'gen_prefix'")
        for field in ("given", "shots"):
            if full.get(field):
                raise UserError(f"{name}: a dialogue cannot have {quoted(field)}")
        made.append(full)
    return {**row, "turns": made}


def flat(rows: Sequence[Doc], chat: bool) -> tuple[Sequence[Doc], list[Place | None]]:
    """Make a document of every turn, and of every row that is not a dialogue.

    Args:
        rows: Complete rows.
        chat: Whether history and worked examples become messages; without a chat template they are
            the beginning of `context`.

    Returns:
        The documents, and the place of each in a dialogue (None outside dialogues).
    """
    docs: list[Doc] | Spool[Doc] = Spool() if isinstance(rows, Spool) else []
    places: list[Place | None] = []
    for index, row in enumerate(rows):
        if not is_dialogue(row):
            shots = "" if chat else shot_text(row.get("shots", ()))
            docs.append({**row, "context": shots + row["context"]})
            places.append(None)
            continue
        for number, turn in enumerate(row["turns"]):
            place = Place(index, number, row["turns"], row["frame"])
            context, question = (turn["context"], turn["question"]) if chat else plain(place)
            docs.append({**turn, "context": context, "question": question})
            places.append(place)
    return docs, places


def plain(place: Place) -> tuple[str, str]:
    """Context and question of a turn without a chat template."""
    opened, asked, closed = (place.frame[name] for name in _FRAME)
    history = [
        opened + turn["context"] + turn["question"] + asked + turn["answer"] + closed
        for turn in place.row_turns[: place.turn]
    ]
    turn = place.row_turns[place.turn]
    return "".join(history) + opened + turn["context"], turn["question"] + asked


def last_prompt(row: Mapping[str, Any], render: Render | None) -> str:
    """The whole prompt of a dialogue's last turn."""
    turns = row["turns"]
    place = Place(0, len(turns) - 1, turns, row["frame"])
    if render is None:
        return "".join(plain(place))
    *messages, _ = place.messages(len(turns))
    return render(messages)


def joints(
    places: Sequence[Place], prompts: Sequence[tuple[str, str]], render: Render | None, name: str
) -> list[Joint]:
    """Split the prompts of one dialogue into what each turn adds.

    Args:
        places: The turns of one dialogue, in order.
        prompts: Context and question of each turn.
        render: The chat template that was applied; None: no template.
        name: Name of the task, for messages.

    Raises:
        UserError: A prompt does not begin with the previous prompt and its answer.
    """
    made = []
    delta = prompts[0][0]
    for j, place in enumerate(places):
        begin, end = _closing(place, render)
        if j + 1 == len(places):
            made.append(Joint(delta, begin, end or ""))
            break
        begin, tail = _rest(prompts[j + 1][0], "".join(prompts[j]), place.answer)
        if tail is None:
            raise UserError(
                f"{name}: the chat template rewrites earlier turns, so no cache can continue from "
                "them; use --no-chat-template"
            )
        if end is None or not tail.startswith(end):
            end = ""  # the template closes an answer only if another turn follows
        made.append(Joint(delta, begin, end))
        delta = tail.removeprefix(end)
    return made


def _closing(place: Place, render: Render | None) -> tuple[str, str | None]:
    """The texts before and after the answer of a turn that nothing follows."""
    if render is None:
        return "", place.frame["end"]
    *before, answer = place.messages(place.turn + 1)
    return _rest(render([*before, answer], closed=True), render(before), place.answer)


def _rest(text: str, told: str, answer: str) -> tuple[str, str | None]:
    """White space before the answer and text after it, if `text` is `told` plus the answer."""
    if not text.startswith(told):
        return "", None
    rest = text[len(told) :]
    bare = rest.lstrip()
    if not bare.startswith(answer):
        return "", None
    return rest[: len(rest) - len(bare)], bare[len(answer) :]


def _common(row: Mapping[str, Any]) -> Doc:
    return {name: value for name, value in row.items() if name not in ("turns", "frame")}
