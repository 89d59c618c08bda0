"""Prompts of lm-eval's tasks, and the line between context and question in each of them.

lm-eval assembles every prompt. The line is found without searching for the document's text in it: in plain text the
prompt ends with that text, and under a chat template the prompt is rendered again with a mark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvbench.errors import UserError
from kvbench.harness.chat import Render
from kvbench.harness.protocol import HarnessFlags

FEWSHOT, DOCUMENT, PROMPT = "fewshot", "document", "prompt"
"""The rules for what the context is; see `docs/harnesses.md`."""
CONTEXT_RULES = (FEWSHOT, DOCUMENT, PROMPT)

_MARK = "\ue000kvbench\ue001"
"""A text that no prompt contains: it consists of private-use characters."""

_MOST_OF_IT = 0.5
"""Least share of a document's own text that a passage must have to be found without its name."""


class Rendered(NamedTuple):
    """A prompt of lm-eval.

    Attributes:
        text: The whole prompt.
        start: Where the document's own text begins, after instructions and examples.
        end: Where it ends; a chat template or the start of the answer may follow.
    """

    text: str
    start: int
    end: int


@dataclass(frozen=True)
class PromptBuilder:
    """Assembles the prompts of a task as lm-eval does.

    Attributes:
        task: The task object of lm-eval.
        render: The chat template; None: plain text.
        flags: lm-eval's flags.
    """

    task: Any
    render: Render | None
    flags: HarnessFlags

    @property
    def shots(self) -> int:
        """Return the number of examples in a prompt."""
        return int(self.task.config.num_fewshot or 0)

    @property
    def instructed(self) -> bool:
        """Return whether examples or an instruction stand before a document's own text."""
        return bool(self.shots or self.flags.system_instruction or self.task.config.description)

    @property
    def multiturn(self) -> bool:
        """Return whether examples are turns of the chat; as in lm-eval, they are if there is a chat template."""
        chosen = self.flags.fewshot_as_multiturn
        return self.render is not None and (True if chosen is None else chosen)

    def prompts(self, document: Any) -> list[Rendered]:
        """Return the prompts of a document: one, or one per choice if the choices are in the prompt.

        Raises:
            UserError: The chat template fails or rewrites the text.
        """
        own_texts = self._own_texts(document)
        places: list[tuple[int, int]] = []
        pending = iter(own_texts)

        def marking(messages: Sequence[Mapping[str, str]], **options: Any) -> str:
            assert self.render is not None
            rendered, start, end = _marked(self.render, messages, next(pending), options)
            places.append((start, end))
            return rendered

        gen_prefix = self.task.doc_to_prefix(document)
        made = self.task.fewshot_context(
            document,
            num_fewshot=self.shots,
            system_instruction=self.flags.system_instruction,
            apply_chat_template=self.render is not None,
            fewshot_as_multiturn=self.multiturn,
            chat_template=marking if self.render is not None else None,
            gen_prefix=gen_prefix,
        )
        texts = made if isinstance(made, list) else [made]
        if self.render is None:
            places = [self._plain_place(text, own, gen_prefix) for text, own in zip(texts, own_texts, strict=True)]
        return [Rendered(text, *place) for text, place in zip(texts, places, strict=True)]

    def _own_texts(self, document: Any) -> list[str]:
        """Return the document's own text in each of its prompts."""
        if getattr(self.task, "multiple_input", 0):
            return [*self.task.doc_to_choice(document)]
        return [self.task.doc_to_text(document)]

    def _plain_place(self, prompt: str, own_text: str, gen_prefix: str | None) -> tuple[int, int]:
        """Return where a document's own text stands at the end of a plain prompt."""
        end = len(prompt)
        if gen_prefix:
            end = len(prompt.removesuffix(gen_prefix))
            if not prompt[:end].endswith(own_text):  # a delimiter stands between them
                end = prompt.rfind(own_text, 0, end) + len(own_text)
        if not prompt[:end].endswith(own_text):  # a task of a Python class may assemble its prompt differently
            return len(prompt), len(prompt)
        return end - len(own_text), end


def _marked(
    render: Render, messages: Sequence[Mapping[str, str]], own_text: str, options: Mapping[str, Any]
) -> tuple[str, int, int]:
    """Render a chat, and find where the text that ends its last user message stands in the prompt.

    Raises:
        UserError: The template changes what it is given, so that there is no such place.
    """
    whole = render([*messages], **options)
    last_user = max(index for index, message in enumerate(messages) if message["role"] == "user")
    content = messages[last_user]["content"]
    start_in_content = len(content) - len(own_text) if content.endswith(own_text) else len(content)

    def rendered_with(text: str) -> str:
        changed = {**messages[last_user], "content": text}
        return render([*messages[:last_user], changed, *messages[last_user + 1 :]], **options)

    before = rendered_with(content[:start_in_content] + _MARK + content[start_in_content:])
    after = rendered_with(content + _MARK)
    start, tail = before.find(_MARK), after.partition(_MARK)[2]
    if start < 0 or whole[:start] != before[:start] or _MARK not in after or not whole.endswith(tail):
        raise UserError("the chat template rewrites the question, so it cannot be told from the context")
    return whole, start, len(whole) - len(tail)


# --- what the context is --------------------------------------------------------------------------


def document_end(document: Any, prompt: Rendered, field: str | None = None) -> int:
    """Return where the passage of a document ends in its prompt; 0 if there is none.

    The passage is the longest text of the document that stands in its own part of the prompt and has text behind it.

    Args:
        document: The document.
        prompt: Its prompt.
        field: The field that holds the passage, such as `passage` or `story.text`; None: the longest one, if it is at
            least half of the document's own text.
    """
    own_text = prompt.text[prompt.start : prompt.end]
    start, end = longest_passage(document, own_text, field)
    is_passage = end > 0 and (field is not None or end - start >= _MOST_OF_IT * len(own_text))
    return prompt.start + end if is_passage else 0


def longest_passage(document: Any, text: str, field: str | None = None) -> tuple[int, int]:
    """Return where the longest field of a document, or one field, stands in a text before more text.

    Returns:
        Its first character and the one behind it; both 0 if there is none.
    """
    before_last = max(0, len(text.rstrip()) - 1)
    longest = (0, 0)
    for name, value in fields(document):
        passage = value.strip()
        if not passage or (field is not None and name != field):
            continue
        found = text.rfind(passage, 0, before_last)
        if found >= 0 and len(passage) > longest[1] - longest[0]:
            longest = (found, found + len(passage))
    return longest


def fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield every text in a document with the name of its field, such as `choices.text[0]`."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from fields(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from fields(item, f"{name}[{position}]")


def context_ends(
    builder: PromptBuilder, documents: Sequence[Any], prompts: Sequence[Sequence[Rendered]]
) -> tuple[str, list[int], str]:
    """Return where the context of every document ends in its prompts.

    Args:
        builder: Assembler of the prompts.
        documents: The documents of a task.
        prompts: The prompts of each; those of one document share their context.

    Returns:
        The rule; the length of each context in characters; and why nothing can be compressed before the question, or
        "" if it can.

    Raises:
        UserError: The chosen rule finds no context in a document.
    """
    rule, field = builder.flags.context, builder.flags.context_field
    name = builder.task.config.task
    if field is not None:
        rule = DOCUMENT
    measures: dict[str, Callable[[Any, Sequence[Rendered]], int]] = {
        FEWSHOT: lambda document, rendered: builder.instructed * min(entry.start for entry in rendered),
        DOCUMENT: lambda document, rendered: min(document_end(document, entry, field) for entry in rendered),
        PROMPT: lambda document, rendered: common_length([entry.text for entry in rendered]),
    }
    candidates = [rule] if rule is not None else [FEWSHOT] * (builder.shots > 0) + [DOCUMENT]
    lacking = 0
    for candidate in candidates:
        ends = [
            min(measures[candidate](document, rendered), common_length([entry.text for entry in rendered]))
            for document, rendered in zip(documents, prompts, strict=True)
        ]
        if all(ends):
            return candidate, ends, ""
        lacking = ends.count(0)
    what = {
        FEWSHOT: "no examples and no instruction",
        DOCUMENT: f"no text of the field {field!r} before the question" if field else "no passage before the question",
        PROMPT: "an empty prompt",
    }
    reason = what[rule] if rule is not None else "neither examples nor a passage before the question"
    ends = [common_length([entry.text for entry in rendered]) for rendered in prompts]
    return PROMPT, ends, f"{name} has {reason} in {lacking} of {len(documents)} prompts"


def common_length(texts: Sequence[str]) -> int:
    """Return how many characters texts begin with in common."""
    first, last = min(texts), max(texts)
    pairs = enumerate(zip(first, last, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(first), len(last)))
