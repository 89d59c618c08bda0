"""Dialogues: a row with `turns` becomes one prompt per turn, each with its history.

The history contains the reference answers. With a chat template its turns are real messages; without one the row's
`frame` joins them. If there are none, a mark stands in their place, by which the chat template is split: such a
dialogue can only be live.
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
_ANSWER_MARK = "..."


@dataclass(frozen=True)
class PromptPosition:
    """Position of a prompt in the rows of a task.

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
        """Return the reference answer; "" if there is none."""
        answer: str = self.row_turns[self.turn]["answer"]
        return answer

    @property
    def history_answer(self) -> str:
        """Return the answer in the history of later turns."""
        return _history_answer(self.row_turns[self.turn])

    def messages(self, turn_count: int) -> list[Message]:
        """Return the first turns of the dialogue, with answers, as chat messages."""
        messages: list[Message] = []
        for turn in self.row_turns[:turn_count]:
            messages.append({"role": "user", "content": turn["context"] + turn["question"]})
            messages.append({"role": "assistant", "content": _history_answer(turn)})
        return messages


@dataclass(frozen=True)
class Joint:
    """The fields of `Request` that place a turn in its dialogue; documented there."""

    delta: str
    answer_begin: str
    answer_end: str


def is_dialogue(row: Mapping[str, Any]) -> bool:
    """Return whether a row of data is a dialogue."""
    return "turns" in row


def complete(row: Mapping[str, Any], location: str) -> Doc:
    """Check a dialogue and fill in the optional fields of its turns; see `Benchmark.docs`.

    Raises:
        UserError: A field is missing, has the wrong type or contains the sentinel.
    """
    turns, frame = row["turns"], row.get("frame")
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{location}: 'turns' must be a list of at least one turn")
    if not isinstance(frame, Mapping) or not all(isinstance(frame.get(key), str) for key in _FRAME):
        raise UserError(f"{location}: 'frame' must have the texts {', '.join(_FRAME)}")
    if any(data.SENTINEL in frame[name] for name in _FRAME):
        raise UserError(f"{location}: the data must not contain {data.SENTINEL}")
    completed = []
    for turn_index, turn in enumerate(turns):
        name = f"{location}, turn {turn_index}"
        if not isinstance(turn, Mapping):
            raise UserError(f"{name}: a turn must be an object")
        full_turn = data.complete({**_common(row), **turn}, name)
        answer = full_turn.setdefault("answer", "")
        if not isinstance(answer, str) or ("answer" in turn and not answer) or answer != answer.strip():
            raise UserError(f"{name}: 'answer' must be a text without white space at either end")
        if full_turn["gen_prefix"]:
            raise UserError(f"{name}: a dialogue cannot have a 'gen_prefix'")
        for field in ("given", "shots"):
            if full_turn.get(field):
                raise UserError(f"{name}: a dialogue cannot have {quoted(field)}")
        completed.append(full_turn)
    if len({bool(turn["answer"]) for turn in completed}) > 1:
        raise UserError(f"{location}: either all turns or no turn can have an 'answer'")
    return {**row, "turns": completed}


def flat(rows: Sequence[Doc], uses_template: bool) -> tuple[Sequence[Doc], list[PromptPosition | None]]:
    """Return one document per turn, or per row that is not a dialogue.

    Args:
        rows: Complete rows.
        uses_template: Whether history and worked examples become messages; without a chat template they are the
            beginning of `context`.

    Returns:
        The documents, and the position of each in a dialogue (None outside dialogues).
    """
    documents: list[Doc] | Spool[Doc] = Spool() if isinstance(rows, Spool) else []
    positions: list[PromptPosition | None] = []
    for row_index, row in enumerate(rows):
        if not is_dialogue(row):
            shot_prefix = "" if uses_template else shot_text(row.get("shots", ()))
            documents.append({**row, "context": shot_prefix + row["context"]})
            positions.append(None)
            continue
        for turn_index, turn in enumerate(row["turns"]):
            position = PromptPosition(row_index, turn_index, row["turns"], row["frame"])
            context, question = (turn["context"], turn["question"]) if uses_template else plain(position)
            documents.append({**turn, "context": context, "question": question})
            positions.append(position)
    return documents, positions


def plain(position: PromptPosition) -> tuple[str, str]:
    """Return context and question of a turn without a chat template."""
    user_start, assistant_start, turn_end = (position.frame[name] for name in _FRAME)
    history = [
        user_start + turn["context"] + turn["question"] + assistant_start + _history_answer(turn) + turn_end
        for turn in position.row_turns[: position.turn]
    ]
    turn = position.row_turns[position.turn]
    return "".join(history) + user_start + turn["context"], turn["question"] + assistant_start


def last_prompt(row: Mapping[str, Any], render: Render | None) -> str:
    """Return the whole prompt of a dialogue's last turn."""
    turns = row["turns"]
    position = PromptPosition(0, len(turns) - 1, turns, row["frame"])
    if render is None:
        return "".join(plain(position))
    *messages, _ = position.messages(len(turns))
    return render(messages)


def joints(
    positions: Sequence[PromptPosition],
    prompts: Sequence[tuple[str, str]],
    render: Render | None,
    task_name: str,
) -> list[Joint]:
    """Split the prompts of one dialogue into what each turn adds.

    Args:
        positions: The turns of one dialogue, in order.
        prompts: Context and question of each turn.
        render: The chat template that was applied; None: no template.

    Raises:
        UserError: A prompt does not begin with the previous prompt and its answer.
    """
    joined = []
    delta = prompts[0][0]
    for turn_index, position in enumerate(positions):
        answer_begin, answer_end = _closing(position, render)
        if turn_index + 1 == len(positions):
            joined.append(Joint(delta, answer_begin, answer_end or ""))
            break
        answer_begin, next_delta = _rest(
            prompts[turn_index + 1][0], "".join(prompts[turn_index]), position.history_answer
        )
        if next_delta is None:
            raise UserError(
                f"{task_name}: the chat template rewrites earlier turns, so no cache can continue from them; "
                "use --no-chat-template"
            )
        if answer_end is None or not next_delta.startswith(answer_end):
            answer_end = ""  # the template closes an answer only if another turn follows
        joined.append(Joint(delta, answer_begin, answer_end))
        delta = next_delta.removeprefix(answer_end)
    return joined


def _closing(position: PromptPosition, render: Render | None) -> tuple[str, str | None]:
    """Return the texts before and after the answer of a final turn."""
    if render is None:
        return "", position.frame["end"]
    *earlier_messages, answer = position.messages(position.turn + 1)
    return _rest(render([*earlier_messages, answer], closed=True), render(earlier_messages), position.history_answer)


def _rest(text: str, known_text: str, answer: str) -> tuple[str, str | None]:
    """Return the whitespace before and the text after the answer, if `text` is `known_text` plus the answer."""
    if not text.startswith(known_text):
        return "", None
    remainder = text[len(known_text) :]
    stripped = remainder.lstrip()
    if not stripped.startswith(answer):
        return "", None
    return remainder[: len(remainder) - len(stripped)], stripped[len(answer) :]


def _history_answer(turn: Mapping[str, Any]) -> str:
    answer: str = turn["answer"]
    return answer or _ANSWER_MARK


def _common(row: Mapping[str, Any]) -> Doc:
    return {key: value for key, value in row.items() if key not in ("turns", "frame")}
