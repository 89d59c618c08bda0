"""Answers the requests of one task for all its cells on this machine, one prefill per context."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.compress import now
from kvbench.engine.generate import Row, Stop, decode
from kvbench.engine.prefix import Prefix, Request, forward
from kvbench.errors import BudgetError
from kvbench.grid import Cell
from kvbench.harness.protocol import LoadedTask
from kvbench.harness.protocol import Request as Question
from kvbench.plugin import Moment, Policy
from kvbench.progress import Reporter
from kvbench.spelling import policy as make_policy
from kvbench.store import Response, RunStore

CPU_SLOTS = 16
GPU_SLOTS = 32


@dataclass(frozen=True)
class Prompt:
    """A question with its token ids."""

    question: Question
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]


@dataclass
class Answer:
    """A row being decoded and the response that it becomes."""

    row: Row
    response: Response


@dataclass
class Executor:
    """Runs one model.

    Args:
        model: On its device, inside `engine`.
        tokenizer: Its tokenizer.
        store: Where responses go as soon as there are any.
        reporter: Told of every response.
        batch_size: Rows decoded together, or `auto`.
    """

    model: nn.Module
    tokenizer: Any
    store: RunStore
    reporter: Reporter
    batch_size: int | str = "auto"
    failed: dict[str, str] = field(default_factory=dict)
    _waiting: list[Answer] = field(default_factory=list)
    _reserve: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        ends: Any = getattr(self.model, "generation_config", None)
        found = getattr(ends, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found]
        self._eos = [e for e in (*listed, self.tokenizer.eos_token_id) if e is not None]

    @torch.no_grad()
    def run(self, task: LoadedTask, prompts: Sequence[Prompt], cells: Sequence[Cell]) -> None:
        """Answer everything that is still open for a task.

        A cell whose policy raises, or does not meet its budget, fails with its reason; the other
        cells go on.

        Args:
            task: The task, whose requests the prompts are.
            prompts: Its requests, those of one context adjacent.
            cells: The cells to answer them for.
        """
        done = self.store.keys()
        policies = {c.cell: make_policy(c.policy) for c in cells}
        # The same room for every row, also when only some of them are left to do.
        self._reserve = max(len(p.question_ids) + p.question.max_new_tokens for p in prompts)
        for ids, group in groupby(prompts, key=lambda p: p.context_ids):
            together = list(group)
            wanted = [
                (c, [p for p in together if _key(c, p) not in done])
                for c in cells
                if c.cell not in self.failed
            ]
            wanted = [(c, missing) for c, missing in wanted if missing]
            if wanted:
                self._context(ids, wanted, policies)
        self._flush()

    def _context(
        self,
        ids: tuple[int, ...],
        wanted: list[tuple[Cell, list[Prompt]]],
        policies: dict[str, Policy],
    ) -> None:
        """Prefill one context once and make a row for every cell and question."""
        needs = {need for c, _ in wanted for need in policies[c.cell].needs}

        def prefill() -> Prefix:
            made = Prefix(self.model, needs)
            made.extend(self._tensor(ids))
            return made

        prefix = prefill()
        for cell, missing in wanted:
            if cell.moment == "question":
                continue
            cache = self._compress(prefix, cell, policies[cell.cell], missing)
            if cache is None:
                prefix = prefill()  # what has failed may have changed it in place
                continue
            for i, prompt in enumerate(missing):
                own = cache.fork() if i + 1 < len(missing) else cache
                self._add(cell, prompt, prefix, own)
        late = [(c, p) for c, missing in wanted if c.moment == "question" for p in missing]
        for question_ids in dict.fromkeys(p.question_ids for _, p in late):
            longer, logits = self._longer(prefix, question_ids)
            for cell, prompt in late:
                if prompt.question_ids != question_ids or cell.cell in self.failed:
                    continue
                cache = self._compress(longer, cell, policies[cell.cell], [prompt])
                if cache is None:
                    longer, logits = self._longer(prefix, question_ids)
                else:
                    self._add(cell, prompt, longer, cache, logits)

    def _longer(self, prefix: Prefix, question_ids: tuple[int, ...]) -> tuple[Prefix, Tensor]:
        """Context and question together, and the logits after them."""
        longer = prefix.fork()
        return longer, longer.extend(self._tensor(question_ids))

    def _compress(
        self, prefix: Prefix, cell: Cell, policy: Policy, missing: list[Prompt]
    ) -> RaggedCache | None:
        """The cell's cache, or None if its policy has failed now."""
        moment: Moment = "question" if cell.moment == "question" else "context"
        wish = Request(policy, Budget.parse(cell.budget), moment, cell.seed)
        try:
            return prefix.compress([wish], self._reserve)[0]
        except (Exception, SystemExit) as error:  # a policy is foreign code: its cell fails
            self._fail(cell, missing[0], reason_of(error))
            return None

    def _add(
        self,
        cell: Cell,
        prompt: Prompt,
        prefix: Prefix,
        cache: RaggedCache,
        logits: Tensor | None = None,
    ) -> None:
        """Queue one response; decode as soon as a batch is full."""
        question = prompt.question
        held = (cache.live_bytes(), cache.allocated_bytes(), cache.full_bytes(0))
        begin = now(self.device)
        if logits is None:
            logits = forward(self.model, cache, self._tensor(prompt.question_ids))
        response = replace(
            _empty(cell, question),
            context_tokens=len(prompt.context_ids),
            question_tokens=len(prompt.question_ids),
            budget_entries=(cache.budget_entries or [0])[0],
            held_entries=(cache.held_entries or [0])[0],
            kv_bytes_live=held[0],
            kv_bytes_allocated=held[1],
            kv_bytes_full=held[2],
            prefill_s=prefix.seconds,
            compress_s=cache.seconds,
            decode_s=now(self.device) - begin,
        )
        stop = Stop(self.tokenizer, self._eos, question.until)
        self._waiting.append(Answer(Row(cache, logits, question.max_new_tokens, stop), response))
        if self._enough():
            self._flush()

    def _enough(self) -> bool:
        """Whether the waiting rows fill a batch."""
        rows = len(self._waiting)
        if isinstance(self.batch_size, int):
            return rows >= (min(self.batch_size, CPU_SLOTS) if self._cpu else self.batch_size)
        if self._cpu:
            return rows >= CPU_SLOTS
        # The rows are copied into one batch: what waits may take a third of the free memory.
        waiting = sum(a.response.kv_bytes_allocated for a in self._waiting)
        free, _ = torch.cuda.mem_get_info(self.device)
        return rows >= GPU_SLOTS or 2 * waiting > free - waiting

    @property
    def _cpu(self) -> bool:
        return self.device.type == "cpu"

    def _flush(self) -> None:
        if not self._waiting:
            return
        answers, self._waiting = self._waiting, []
        begin = time.perf_counter()
        slots = CPU_SLOTS if self._cpu else len(answers)
        decode(self.model, [a.row for a in answers], slots)
        each = (time.perf_counter() - begin) / len(answers)
        self.store.append(
            [
                replace(
                    a.response,
                    response=a.row.stop.text(a.row.tokens),
                    stop=a.row.reason,
                    generated_tokens=len(a.row.tokens),
                    decode_s=a.response.decode_s + each,
                )
                for a in answers
            ]
        )
        self.reporter.advance(len(answers))

    def _fail(self, cell: Cell, prompt: Prompt, reason: str) -> None:
        self.failed[cell.cell] = reason
        self.store.append([replace(_empty(cell, prompt.question), error=reason)])
        self.reporter.message(f"{cell.task}, {cell.policy} at {cell.budget} failed: {reason}")

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], device=self.device)


def reason_of(error: BaseException) -> str:
    """One line that says what a plugin has raised, and where."""
    text = (str(error) or "no message").splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, BudgetError):
        return text
    return f"{type(error).__name__}: {text}{where}"


def pending(
    store: RunStore, prompts: Sequence[Prompt], cells: Sequence[Cell]
) -> Iterator[tuple[Cell, Prompt]]:
    """What has no response yet."""
    done = store.keys()
    return ((c, p) for c in cells for p in prompts if _key(c, p) not in done)


def _key(cell: Cell, prompt: Prompt) -> tuple[str, str, int, int]:
    return (cell.cell, prompt.question.sample_id, prompt.question.question_id, 0)


def _empty(cell: Cell, question: Question) -> Response:
    return Response(
        cell=cell.cell,
        sample_id=question.sample_id,
        question_id=question.question_id,
        repeat=0,
        doc_id=question.doc_id,
        context_id=question.context_id,
        response="",
        stop="",
        error="",
        context_tokens=0,
        question_tokens=0,
        generated_tokens=0,
        budget_entries=0,
        held_entries=0,
        kv_bytes_live=0,
        kv_bytes_allocated=0,
        kv_bytes_full=0,
        prefill_s=0.0,
        compress_s=0.0,
        decode_s=0.0,
    )
