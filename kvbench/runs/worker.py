"""Answers the requests of one task for all its cells on this machine, one prefill per context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.budget import Budget
from kvbench.decoding import THINK, Thinking
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import now
from kvbench.engine.decode import Batch, Row, Stop
from kvbench.engine.draw import Draw
from kvbench.engine.models import devices_of
from kvbench.engine.prefix import Prefix, Request, forward
from kvbench.engine.upkeep import tail_of
from kvbench.errors import reason_of
from kvbench.harness.protocol import LoadedTask
from kvbench.moments import LATER, split_moment
from kvbench.plugin import Need, Policy
from kvbench.progress import Reporter
from kvbench.runs.answers import (
    Answer,
    Lane,
    Prompt,
    alike,
    begun,
    by_cell,
    empty,
    finished,
    forks,
    key_of,
)
from kvbench.runs.cell import Cell
from kvbench.runs.store import RunStore
from kvbench.spelling import policy as make_policy

CPU_SLOTS = 16
GPU_SLOTS = 32

Wanted = list[tuple[Cell, list[Prompt]]]


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
    _lanes: dict[str, Lane] = field(default_factory=dict)
    _reserve: int = 0
    _width: int = 0

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self._places = devices_of(self.model)
        ends: Any = getattr(self.model, "generation_config", None)
        found = getattr(ends, "eos_token_id", None)
        listed = found if isinstance(found, list) else [found]
        self._eos = [e for e in (*listed, self.tokenizer.eos_token_id) if e is not None]
        self._thinking = Thinking.of(self.tokenizer)

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
        from kvbench.runs.dialogues import run_dialogues

        done = self.store.keys()
        policies = {c.cell: make_policy(c.policy) for c in cells}
        live = [c for c in cells if c.moment == "turns"]
        if live:
            run_dialogues(self, prompts, live, policies, done)
        cells = [c for c in cells if c.moment != "turns"]
        # The same room and width for every row, also when only some of them are left to do.
        self._reserve = max(len(p.question_ids) + p.limit for p in prompts)
        self._width = max(len(p.question_ids) for p in prompts)
        for ids, group in groupby(prompts, key=lambda p: p.context_ids):
            together = list(group)
            wanted = [
                (c, [p for p in together if key_of(c, p) not in done])
                for c in cells
                if c.cell not in self.failed
            ]
            wanted = [(c, missing) for c, missing in wanted if missing]
            if wanted:
                self._context(ids, wanted, policies)
        for name in list(self._lanes):
            self._flush(name)

    def _context(self, ids: tuple[int, ...], wanted: Wanted, policies: dict[str, Policy]) -> None:
        """Make a row for every cell and question of one context, which is prefilled once."""
        chunked = [(c, m) for c, m in wanted if c.moment.startswith("chunked")]
        whole = [(c, m) for c, m in wanted if not c.moment.startswith("chunked")]
        needs = {need for c, _ in whole for need in policies[c.cell].needs}
        prefix = self.prefill(ids, needs)[0] if whole else None
        late = []
        for cell, missing in whole:
            assert prefix is not None
            if cell.moment in ("question", "decode"):
                late += [(cell, prompt) for prompt in missing]
                continue
            cache = self.compress(prefix, cell, policies[cell.cell], missing[0])
            if cache is None:
                prefix = None
                prefix, _ = self.prefill(ids, needs)  # what failed may have changed it in place
                continue
            for prompt, own in zip(missing, forks(len(missing), cache), strict=True):
                self._add("ask", cell, prompt, own, prefix.seconds, own.seconds)
        for question_ids in dict.fromkeys(p.question_ids for _, p in late):
            assert prefix is not None
            longer, logits = self._longer(prefix, question_ids)
            for cell, repeats in alike(late):
                if repeats[0].question_ids != question_ids or cell.cell in self.failed:
                    continue
                cache = self.compress(longer, cell, policies[cell.cell], repeats[0])
                if cache is None:
                    longer, logits = self._longer(prefix, question_ids)
                    continue
                lane = "told" if cache.upkeep is None else f"decode {cell.policy}"
                for prompt, own in zip(repeats, forks(len(repeats), cache), strict=True):
                    self._add(lane, cell, prompt, own, longer.seconds, cache.seconds, logits)
        self._chunks(chunked, policies)

    def _longer(self, prefix: Prefix, question_ids: tuple[int, ...]) -> tuple[Prefix, Tensor]:
        """Context and question together, and the logits after them."""
        longer = prefix.fork()
        return longer, longer.extend(self.tensor(question_ids))

    def _chunks(self, wanted: Wanted, policies: dict[str, Policy]) -> None:
        """Prefill whole prompts in chunks, each cut back to budget; cells share the first chunk."""
        first: tuple[tuple[int, ...], Prefix, Tensor] | None = None
        needs = {need for c, _ in wanted for need in policies[c.cell].needs}
        pairs = alike([(cell, prompt) for cell, missing in wanted for prompt in missing])
        tails = [_tail(cell, policies[cell.cell], repeats[0]) for cell, repeats in pairs]
        heads = [_head(cell, r[0], tail) for (cell, r), tail in zip(pairs, tails, strict=True)]
        for head in dict.fromkeys(heads):
            for (cell, repeats), own, tail in zip(pairs, heads, tails, strict=True):
                if own != head or cell.cell in self.failed:
                    continue
                if first is None or first[0] != head:
                    first = None  # what it held goes before the next takes room
                    first = (head, *self.prefill(head, needs))
                prompt = repeats[0]
                cache = self.compress(
                    first[1],
                    cell,
                    policies[cell.cell],
                    prompt,
                    (len(prompt.context_ids) + len(prompt.question_ids), tail),
                )
                if cache is None:
                    first = None  # what failed may have changed it in place
                else:
                    self._rest(cell, repeats, first[1], cache, first[2], tail)

    def _rest(
        self,
        cell: Cell,
        repeats: Sequence[Prompt],
        prefix: Prefix,
        cache: RaggedCache,
        logits: Tensor,
        tail: int,
    ) -> None:
        """Prefill what comes after the first chunk, on the cell's own cache."""
        prompt, (_, size) = repeats[0], split_moment(cell.moment)
        ids = (*prompt.context_ids, *prompt.question_ids)
        body, upkeep = len(ids) - tail, cache.upkeep
        allowed = [] if upkeep is None else upkeep.budget
        began = now(self.device)
        try:
            for at in range(size, body, size):
                if upkeep is not None and at + size < body:
                    upkeep.final = False
                elif upkeep is not None:
                    upkeep.final, upkeep.coming = True, tail
                    upkeep.budget = [b - tail for b in allowed]
                logits = forward(self.model, cache, self.tensor(ids[at : min(at + size, body)]))
            if upkeep is not None:
                upkeep.budget, upkeep.coming = allowed, 0
            if tail:
                logits = forward(self.model, cache, self.tensor(ids[body:]))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a policy that cuts between chunks is foreign code
            self.fail(cell, prompt, reason_of(error))
            return
        cuts = 0.0
        if cache.upkeep is not None:
            cuts, info = cache.upkeep.seconds, cache.upkeep.info
            cache.budget_entries = [info.layers * info.kv_heads * cache.upkeep.budget[0]]
            cache.held_entries = [cache.live_entries(0)]
        cache.settle()
        prefill_s = prefix.seconds + now(self.device) - began - cuts
        for prompt, own in zip(repeats, forks(len(repeats), cache), strict=True):
            self._add("told", cell, prompt, own, prefill_s, cache.seconds + cuts, logits)

    def prefill(self, ids: Sequence[int], needs: set[Need]) -> tuple[Prefix, Tensor]:
        """A prefix of some tokens, observed as is needed, and the logits after them."""
        made = Prefix(self.model, needs)
        return made, made.extend(self.tensor(ids))

    def compress(
        self,
        prefix: Prefix,
        cell: Cell,
        policy: Policy,
        prompt: Prompt,
        chunked: tuple[int | None, int] = (None, 0),
    ) -> RaggedCache | None:
        """The cell's cache, or None if its policy has failed now; see `Request` for `chunked`."""
        moment = split_moment(cell.moment or "context")[0]
        wish = Request(policy, Budget.parse(cell.budget), moment, cell.seed, *chunked)
        reserve = None if moment in LATER else self._reserve
        try:
            return prefix.compress([wish], reserve)[0]
        except (Exception, SystemExit) as error:  # a policy is foreign code: its cell fails
            self.fail(cell, prompt, reason_of(error))
            return None

    def row(self, cell: Cell, prompt: Prompt) -> Row:
        """A response of a cell to a prompt, to be generated."""
        asked = prompt.question
        opened = asked.question.rstrip().endswith(THINK)
        stop = Stop(self.tokenizer, self._eos, asked.until, self._thinking, opened)
        draw = None
        if asked.sampling is not None:
            # Neither policy nor budget: cells that are compared draw with the same noise.
            key = (cell.seed, cell.task, asked.sample_id, asked.question_id, prompt.repeat)
            draw = Draw(asked.sampling, key)
        return Row(prompt.limit, stop, draw=draw, given=prompt.given_ids)

    def _add(
        self,
        lane: str,
        cell: Cell,
        prompt: Prompt,
        cache: RaggedCache,
        prefill_s: float,
        compress_s: float,
        logits: Tensor | None = None,
    ) -> None:
        """Queue one response; decode as soon as a batch is full."""
        if cell.cell in self.failed:  # while an earlier repeat was decoded
            return
        response = begun(cell, prompt, cache, prefill_s, compress_s)
        held = self._lanes.setdefault(lane, Lane(logits is not None)).waiting
        held.append(Answer(cell, prompt, self.row(cell, prompt), cache, response, logits))
        everything = (a.cache for lane in self._lanes.values() for a in lane.waiting)
        if not self.room(len(held), everything):
            self._flush(lane)

    def room(self, rows: int, waiting: Iterable[RaggedCache]) -> bool:
        """Whether a batch of `rows` may grow, given all the caches that wait in this process."""
        if isinstance(self.batch_size, int):
            return rows < (min(self.batch_size, CPU_SLOTS) if self.cpu else self.batch_size)
        if self.cpu:
            return rows < CPU_SLOTS
        # The rows are copied into one batch: what waits may take a third of the free memory.
        taken = sum(cache.allocated_bytes() for cache in waiting)
        # Layers, and so their caches, may be spread over several GPUs.
        places = [d for d in self._places if d.type == "cuda"]
        free = len(places) * min(torch.cuda.mem_get_info(place)[0] for place in places)
        return rows < GPU_SLOTS and 2 * taken <= free - taken

    @property
    def cpu(self) -> bool:
        """Whether the model runs on the CPU."""
        return self.device.type == "cpu"

    def slots(self, rows: int) -> int:
        """Rows of a batch in which `rows` are decoded."""
        return CPU_SLOTS if self.cpu else rows

    def _flush(self, name: str) -> None:
        """Decode what waits in a lane."""
        lane = self._lanes[name]
        answers, lane.waiting = lane.waiting, []
        if not answers:
            return
        began = now(self.device)
        try:
            if not lane.asked and answers[0].cache.slides:
                for a in answers:  # padding would push tokens out of the sliding windows
                    a.logits = forward(self.model, a.cache, self.tensor(a.prompt.question_ids))
            batch = Batch(self.model, [a.cache for a in answers], self.slots(len(answers)))
            known = [a.logits for a in answers if a.logits is not None]
            if known:
                logits = torch.cat(known)
            else:
                logits = batch.feed([a.prompt.question_ids for a in answers], self._width)
            rows = [a.row for a in answers]
            if rows[0].given:
                batch.measure(rows, logits)
            else:
                batch.answer(rows, logits, pause=batch.cache.upkeep is not None)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a policy that cuts while it decodes is foreign code
            if not name.startswith("decode "):
                raise
            apart = by_cell(answers)
            if len(apart) == 1:
                for a in answers:
                    self.fail(a.cell, a.prompt, reason_of(error))
            else:  # whose fault it was shows when each goes alone
                for own in apart:
                    lane.waiting = [replace(a, row=self.row(a.cell, a.prompt)) for a in own]
                    self._flush(name)
            return
        self.done(finished(answers, batch.cache, now(self.device) - began))

    def done(self, responses: Sequence[Any]) -> None:
        """Store responses."""
        self.store.append(list(responses))
        self.reporter.advance(len(responses))

    def fail(self, cell: Cell, prompt: Prompt, reason: str) -> None:
        """Give a cell up."""
        if cell.cell not in self.failed:
            self.reporter.message(f"{cell.task}, {cell.policy} at {cell.budget} failed: {reason}")
        self.failed[cell.cell] = reason
        self.store.append([replace(empty(cell, prompt), error=reason)])

    def tensor(self, ids: Sequence[int]) -> Tensor:
        """Token ids on the device, `[1, n]`."""
        return torch.tensor([list(ids)], device=self.device)


def _head(cell: Cell, prompt: Prompt, tail: int) -> tuple[int, ...]:
    """The first chunk of a prompt, without what comes after the last cut."""
    ids = (*prompt.context_ids, *prompt.question_ids)
    return ids[: min(split_moment(cell.moment)[1], len(ids) - tail)]


def _tail(cell: Cell, policy: Policy, prompt: Prompt) -> int:
    """How many tokens of a prompt come after its last cut."""
    tokens = len(prompt.context_ids) + len(prompt.question_ids)
    return tail_of(policy, Budget.parse(cell.budget), tokens)


def pending(
    store: RunStore, prompts: Sequence[Prompt], cells: Sequence[Cell]
) -> Iterator[tuple[Cell, Prompt]]:
    """What has no response yet."""
    done = store.keys()
    return ((c, p) for c in cells for p in prompts if key_of(c, p) not in done)
