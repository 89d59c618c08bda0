"""What a benchmark is, and what a harness gives the runner: prompts, and a scorer of responses.

A harness never sees a model. The runner takes `LoadedTask.requests`, has the engine answer them,
and calls `LoadedTask.score` on the responses it has, at any time and as often as it likes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from kvbench.decoding import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvbench.judge.base import Judge

Key = tuple[str, int, int]
"""A response's key within a cell: (sample_id, question_id, repeat)."""


@dataclass(frozen=True)
class Request:
    """One question about one context.

    `context + question` is the whole prompt, with few-shot examples, chat template and answer
    prefix applied; the question follows the context directly.

    Attributes:
        task: Leaf name.
        sample_id: Name of the sample, unique in the task together with `question_id`.
        doc_id: Index of the sample's row in the task's data.
        question_id: Counts the questions about one context, from 0.
        context_id: Hash of the context; statistics cluster by it.
        context: The part of the prompt whose cache is compressed.
        question: The rest of the prompt.
        until: Strings that end the answer.
        max_new_tokens: Limit of the answer, in tokens.
        target: The reference answers.
        extra: What a report may group by, e.g. `depth` (percent) of a needle.
        dialogue: Names the dialogue that this question is a turn of; "" outside dialogues. The
            turns of a dialogue are adjacent and in order, and share `sample_id` and `context_id`.
        turn: Number of the turn, from 0; it is the `question_id`.
        delta: What this turn adds before its question: the new facts, and what opens a turn.
        answer: The reference answer as it stands in the history that later turns are given.
        answer_begin: What a history has between a question and the stripped answer: "" but for
            chat templates that put white space there.
        answer_end: What a history has after the stripped answer, before the next turn's `delta`.
        sampling: How the answer is drawn; None: greedily.
        repeats: How many answers are drawn.
        given: A text that follows the prompt and is measured instead of an answer: its negative
            log-likelihood under the cell's cache. The response is then the JSON object
            `{"nll": sum in nats, "tokens": how many}`.

    A dialogue's history with reference answers is the joint text `delta + question + answer_begin +
    answer + answer_end` of its turns; up to and with the question of turn j it is `context +
    question` of that turn's request, to the character. A live dialogue puts its own answers there.
    """

    task: str
    sample_id: str
    doc_id: int
    question_id: int
    context_id: str
    context: str
    question: str
    until: tuple[str, ...]
    max_new_tokens: int
    target: tuple[str, ...]
    extra: Mapping[str, str | int | float] = field(default_factory=dict)
    dialogue: str = ""
    turn: int = 0
    delta: str = ""
    answer: str = ""
    answer_begin: str = ""
    answer_end: str = ""
    sampling: Sampling | None = None
    repeats: int = 1
    given: str = ""


@dataclass
class LoadedTask(ABC):
    """The prompts of a leaf task at one length, and its scorer.

    Attributes:
        name: Leaf name.
        group: Name of the benchmark.
        version: Version of the task; with the data hash it says what was asked.
        data_hash: 16 hex digits over task version, tokenizer, length, seed and lexicon, or, for
            data that is not generated, over the content. Never over the number of samples.
        metric: Name of the metric.
        higher_is_better: Whether more is better.
        chance: Score of a responder that has not seen the context.
        length: Tokens that prompt and answer may take, or 0 where the data is not sized.
        requests: Ordered by sample; those of one context are adjacent.
        judge: Who judges the responses, where the metric asks for that; the planner sets it (None:
            the environment says).
        rubric: See `Benchmark.judge`.
        truncated: How many contexts were cut to fit the model; the planner sets it.
    """

    name: str
    group: str
    version: str
    data_hash: str
    metric: str
    higher_is_better: bool
    chance: float
    length: int
    requests: list[Request]
    judge: Judge | None = field(default=None, kw_only=True)
    rubric: str = field(default="", kw_only=True)
    truncated: int = field(default=0, kw_only=True)

    @abstractmethod
    def score(self, responses: Mapping[Key, str]) -> tuple[dict[Key, float], float]:
        """Score the responses that there are.

        Args:
            responses: Response text by (sample_id, question_id, repeat); any subset of the samples.

        Returns:
            The score of each response, and the harness's aggregate over them (NaN for none).

        Raises:
            KeyError: A key that is not of this task.
            JudgeError: A response was given no verdict.
        """


class Harness(Protocol):
    """Loads tasks. `kvbench.harness.lm_eval.LmEvalHarness` is one."""

    name: str

    def load(
        self,
        task: str,
        *,
        length: int,
        samples: int,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
        tokenizer_id: str,
        lexicon: str,
        chat_template: bool,
        cache_dir: Path,
        thinking: bool | None = None,
    ) -> LoadedTask:
        """Load a leaf task.

        Args:
            task: Leaf name, or the path of the user's own `.jsonl`.
            length: Tokens of context + question + answer at most.
            samples: How many samples; the first of a larger number are the same.
            seed: Seed of the data.
            tokenizer: Sizes the prompts and applies the chat template.
            tokenizer_id: What the tokenizer is called in messages; its content is hashed.
            lexicon: "natural" (real models) or "reference" (the shipped tiny model).
            chat_template: Whether to apply the tokenizer's chat template.
            cache_dir: Where generated data is kept.
            thinking: What the chat template is told as `enable_thinking`; None: nothing.

        Raises:
            NeedsHub: The data lies on the hub, which is not to be had.
            UserError: The task is unknown, or does not fit into `length`.
        """
        ...
