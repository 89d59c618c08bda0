"""Answers the requests of one task for all its cells on this machine, one prefill per context."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from kvbench.budget import Budget
from kvbench.engine.cache import RaggedCache
from kvbench.engine.generate import Row, Stop, decode
from kvbench.engine.prefix import Prefix, Request, forward
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
    _slots: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        ends: Any = getattr(self.model, "generation_config", None)
        found = getattr(ends, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found]
        self._eos = [e for e in (*listed, self.tokenizer.eos_token_id) if e is not None]

    @torch.inference_mode()
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
        prefix = Prefix(self.model, needs)
        prefix.extend(self._tensor(ids))
        early = [(c, missing) for c, missing in wanted if c.moment != "question"]
        late = [(c, missing) for c, missing in wanted if c.moment == "question"]
        for cell, missing in early:
            reserve = max(len(p.question_ids) + p.question.max_new_tokens for p in missing)
            cache = self._compress(prefix, cell, policies[cell.cell], missing, reserve)
            if cache is None:
                continue
            for i, prompt in enumerate(missing):
                own = cache.fork() if i + 1 < len(missing) else cache
                self._add(cell, prompt, prefix, own)
        questions = {p.question_ids: p for _, missing in late for p in missing}
        for question_ids in questions:
            longer = prefix.fork()
            logits = longer.extend(self._tensor(question_ids))
            for cell, missing in late:
                for prompt in missing:
                    if prompt.question_ids != question_ids:
                        continue
                    reserve = prompt.question.max_new_tokens
                    cache = self._compress(longer, cell, policies[cell.cell], [prompt], reserve)
                    if cache is not None:
                        self._add(cell, prompt, longer, cache, logits)

    def _compress(
        self, prefix: Prefix, cell: Cell, policy: Policy, missing: list[Prompt], reserve: int
    ) -> RaggedCache | None:
        if cell.cell in self.failed:
            return None
        moment: Moment = "question" if cell.moment == "question" else "context"
        wish = Request(policy, Budget.parse(cell.budget), moment, cell.seed)
        try:
            return prefix.compress([wish], reserve)[0]
        except Exception as error:  # a policy is foreign code: whatever it raises fails its cell
            self._fail(cell, missing[0], f"{type(error).__name__}: {error}".splitlines()[0])
            return None

    def _add(
        self,
        cell: Cell,
        prompt: Prompt,
        prefix: Prefix,
        cache: RaggedCache,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Queue one response; decode as soon as a batch is full."""
        question = prompt.question
        held = (cache.live_bytes(), cache.allocated_bytes(), cache.full_bytes(0))
        begin = time.perf_counter()
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
            decode_s=time.perf_counter() - begin,
        )
        stop = Stop(self.tokenizer, self._eos, question.until)
        self._waiting.append(Answer(Row(cache, logits, question.max_new_tokens, stop), response))
        if len(self._waiting) >= self._batch(held[2]):
            self._flush()

    def _batch(self, row_bytes: int) -> int:
        """Rows per batch, decided once: what fits in half of a GPU's free memory."""
        if not self._slots:
            self._slots = CPU_SLOTS
            if isinstance(self.batch_size, int):
                self._slots = self.batch_size
            elif self.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(self.device)
                self._slots = max(1, min(GPU_SLOTS, free // (4 * max(1, row_bytes))))
        return self._slots

    def _flush(self) -> None:
        if not self._waiting:
            return
        answers, self._waiting = self._waiting, []
        begin = time.perf_counter()
        decode(self.model, [a.row for a in answers], self._slots)
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

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self.device)


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
