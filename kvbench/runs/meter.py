"""Progress of a run in tokens: counts forwards, names the phase, and estimates the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvbench.progress import Reporter
from kvbench.runs.answers import Prompt, key_of
from kvbench.runs.cell import Cell
from kvbench.runs.index import Key
from kvbench.runs.schema import Response
from kvbench.runs.work import Work, answer_tokens, total_work

_READING = ("prefill", "compress")
"""Phases whose forwards read contexts. Policies that read a context twice do so while they compress."""


class _Begun(NamedTuple):
    """Planned tokens of a response that is being generated, and of its answer alone."""

    tokens: int
    steps: int


class Meter:
    """Counts the tokens of one model's forwards in a run and reports them.

    A context is complete when all its cells are compressed, and a response when it is stored; until then their
    forwards count one by one. An answer that ends before its limit counts in full. The count never falls, never exceeds
    the plan, and ends at the plan, even if a cell fails or memory runs out and work is repeated.

    Args:
        reporter: Progress reporter.
        clock: Returns the time in seconds.
        fidelity: Whether cells are also compared with the full cache on its own answers.
    """

    def __init__(
        self, reporter: Reporter, clock: Callable[[], float] = time.perf_counter, *, fidelity: bool = False
    ) -> None:
        self.reporter, self._fidelity = reporter, fidelity
        self._clock = clock
        self._planned = self._job_end = Work()
        self._context_end = 0  # of the contexts that are being read; 0 between them
        self._read = self._answered = self._shown = 0
        self._complete = self._ahead = self._begun_tokens = 0  # tokens of complete responses, and of those begun
        self._begun: dict[Key, _Begun] = {}
        self._phase, self._phase_start = "decode", clock()
        self._seconds = {"prefill": 0.0, "compress": 0.0, "decode": 0.0}

    @contextmanager
    def running(self, planned: Work, description: str) -> Iterator[None]:
        """Report the work of one model while the block runs.

        Args:
            planned: The work of all its jobs.
            description: The model.
        """
        self._planned, self._phase_start = planned, self._clock()
        self.reporter.start(planned.tokens, description, "tokens")
        try:
            yield
        finally:
            self.reporter.stop()

    @contextmanager
    def job(self, planned: Work) -> Iterator[None]:
        """Count the work of one job."""
        self._job_end = total_work([self._job_end, planned])
        self.forget_begun()
        yield
        self.forget_begun()
        self._read, self._answered = self._job_end
        self._complete = self._answered
        self._report()

    def forget_begun(self) -> None:
        """Forget responses that were begun: all are stored, have failed, or are begun again."""
        self._begun.clear()
        self._ahead = self._begun_tokens = 0
        self._complete = max(self._complete, self._answered)

    @contextmanager
    def contexts(self, tokens: int) -> Iterator[None]:
        """Count `tokens` tokens for contexts that are read and compressed while the block runs."""
        self._context_end = min(self._read + tokens, self._job_end.read) if tokens else 0
        yield
        self._read = max(self._read, self._context_end)
        self._context_end = 0
        self._report()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name a phase while the block runs: `prefill` or `compress`; otherwise it is `decode`."""
        previous_phase = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(previous_phase)

    def _enter(self, name: str) -> None:
        phase_end = self._clock()
        self._seconds[self._phase] += phase_end - self._phase_start
        self._phase, self._phase_start = name, phase_end
        self.reporter.phase(name)

    def fed(self, tokens: int) -> None:
        """Count the tokens of a forward."""
        if self._context_end and self._phase in _READING:
            self._read = max(self._read, min(self._read + tokens, self._context_end))
        else:
            self._ahead += tokens
            self._count_answers()
        self._report()

    def begin(self, cell: Cell, prompt: Prompt, earlier_turn: Prompt | None = None) -> None:
        """Begin the response of a cell to a prompt; see `answer_tokens`."""
        begun = _Begun(answer_tokens(cell, prompt, earlier_turn, self._fidelity), prompt.steps)
        if self._begun.setdefault(key_of(cell, prompt), begun) is begun:
            self._begun_tokens += begun.tokens

    def end(self, responses: Sequence[Response]) -> None:
        """Count responses that are stored."""
        for response in responses:
            if (begun := self._begun.pop(response.key, None)) is not None:
                self._begun_tokens -= begun.tokens
                self._complete += begun.tokens
                # Nothing follows the last token, so it is not fed.
                self._ahead -= begun.tokens - 1 - max(0, begun.steps - response.generated_tokens)
        if not self._begun:
            self._ahead = 0
        self._count_answers()
        self._report()

    def _count_answers(self) -> None:
        begun_tokens = min(max(0, self._ahead), self._begun_tokens)
        self._answered = max(self._answered, min(self._complete + begun_tokens, self._job_end.answered))

    def _report(self) -> None:
        counted = self._read + self._answered
        if counted > self._shown:
            self.reporter.advance(counted - self._shown, self.seconds_left())
            self._shown = counted

    def seconds_left(self) -> float | None:
        """Estimate the seconds left from the speed so far; None before the first context has been read."""
        running = self._clock() - self._phase_start
        reading, answering = self._seconds["prefill"] + self._seconds["compress"], self._seconds["decode"]
        if self._phase in _READING:
            reading += running
        else:
            answering += running
        if not self._read and not self._complete:
            return None
        # Until the first answer, a token of an answer is taken to cost as much as one of a context.
        read_pace = reading / self._read if self._read else answering / self._answered
        answer_pace = answering / self._answered if self._answered else read_pace
        left = Work(self._planned.read - self._read, self._planned.answered - self._answered)
        return read_pace * left.read + answer_pace * left.answered
