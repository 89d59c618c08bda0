"""Checks of one family of models against the oracle, for `benchmarks/families.py`.

Each check returns an error: the largest difference of logits, in standard deviations of the stock model's logits, or of
attention weights. A check of something that kvbench refuses ends in a `UserError`.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

import kvbench
from benchmarks.family_models import VOCABULARY, Family
from benchmarks.family_oracle import StockCache, oracle_attention, oracle_logits, stock_logits
from kvbench.budget import Budget
from kvbench.engine.decode import Batch
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model
from kvbench.engine.model_check import measure_model
from kvbench.engine.models import cache_inputs, decoder_of, model_info
from kvbench.engine.prefix import Compression, Prefix
from kvbench.errors import UserError
from kvbench.parts import TopK, Uniform
from kvbench.plugin import AttentionMass, Need, Policy, Queries, Score, Scores, Surprisal, View, protect_nothing
from kvbench.registry import TRAINERS, get
from kvbench.spelling import policy
from kvbench.training.settings import complete
from kvbench.training.student import Student

TOLERANCE = 1e-3
"""Largest error of a family that is right; float32 gives 1e-5 and less."""

NOTICEABLE = 5e-3
"""Smallest change of the logits by eviction in a test that can fail."""

BUDGET = 0.3
POLICIES = ("snapkv:window=8", "adakv:window=8", "criticalkv:window=8", "keydiff")
ANY_KEYS = ("snapkv:window=8", "keydiff")
"""Policies for the checks of other things than policies."""

DECODING, DECODING_BUDGET = "h2o:buffer=0", 20
"""Policy and budget, in tokens, that evict at every step of decoding."""

CONTEXT, QUESTION, ANSWER, PADDING = 64, 5, 3, 13
"""Tokens of the context, the question and the answer, and columns of padding of the shorter context."""

OBSERVED = 8
"""Queries of the window that policies observe."""

FIRST_WORD, LAST_WORD = 3, VOCABULARY - 2
"""Token ids of texts; the others are special, or those of images."""


class StockDiffersError(Exception):
    """The stock model contradicts itself, so there is nothing to compare with."""


class BlindError(Exception):
    """A comparison could not have failed."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of one check; exactly one of the first three is given, or only a note.

    Attributes:
        error: The error, if something was compared.
        refusal: Why kvbench refuses it, in one line.
        failure: What went wrong otherwise.
        note: What a reader must know about the comparison.
    """

    error: float | None = None
    refusal: str = ""
    failure: str = ""
    note: str = ""

    @property
    def is_wrong(self) -> bool:
        """Return whether kvbench is neither right nor refuses in one line."""
        is_far = self.error is not None and not self.error <= TOLERANCE  # also if it is NaN
        return bool(self.failure) or is_far or "\n" in self.refusal

    @property
    def text(self) -> str:
        """Return the outcome in a few words, for the terminal."""
        if self.failure or self.refusal:
            return self.failure or f"refused: {self.refusal}"
        return self.note if self.error is None else f"{self.error:.0e}"


@dataclass(frozen=True)
class FamilyResult:
    """Outcomes of one family, one per column of the table.

    Attributes:
        family: Name of the family.
        kind: Kind of its attention.
        seconds: Time of all checks.
        prefill: Logits of the context with the full cache against the stock model.
        decode: Logits of single steps with the full cache against the stock model.
        evicted: Logits of single steps after eviction against the oracle, for `POLICIES`.
        padded: Both in a batch with padding on the left.
        chunked: Logits of a question that is fed as one chunk after eviction, against the oracle token by token.
        run: The same with the model loaded from a folder and a batch of caches compressed from one prefill, as in a
            run.
        decoding: Logits of single steps, if entries are evicted at every step.
        observed: Attention of the last queries, accumulated attention and surprisal, as policies see them.
        gates: Loss of gates that forget nothing, in the training of retention gates, against the stock model.
    """

    family: str
    kind: str
    seconds: float
    prefill: Outcome
    decode: Outcome
    evicted: Outcome
    padded: Outcome
    chunked: Outcome
    run: Outcome
    decoding: Outcome
    observed: Outcome
    gates: Outcome

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcomes by column."""
        return {column: getattr(self, column) for column in COLUMNS}

    @property
    def status(self) -> str:
        """Return `wrong` if any check is, `refused` if kvbench refuses the full cache, else `right`."""
        if any(outcome.is_wrong for outcome in self.outcomes.values()):
            return "wrong"
        return "refused" if self.prefill.refusal else "right"

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {**asdict(self), "status": self.status}


COLUMNS = tuple(field.name for field in fields(FamilyResult) if field.type == "Outcome")


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the largest difference of logits in standard deviations of the expected ones."""
    return float((logits - expected).abs().max() / expected.std())


def combined(steps: Sequence[Tensor]) -> Tensor:
    """Join the logits of consecutive chunks."""
    return torch.cat([*steps], 1)


def _texts(rows: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, LAST_WORD + 1, (rows, length), generator=generator)


class Checks:
    """The checks of one model.

    Args:
        family: Its family.
    """

    def __init__(self, family: Family) -> None:
        self.family = family
        self.model = family.build()
        self.context = _texts(1, CONTEXT, seed=5)
        self.tail = _texts(1, QUESTION + ANSWER, seed=6)

    @property
    def steps(self) -> list[Tensor]:
        """The context, then single tokens."""
        return [self.context, *self.tail.split(1, 1)]

    @cached_property
    def stock(self) -> tuple[list[Tensor], StockCache]:
        """Logits of the context and of single tokens by the stock model, and its cache."""
        cache = StockCache(self.model)
        return stock_logits(self.model, self.steps, cache), cache

    @cached_property
    def full_oracle(self) -> Tensor:
        """Logits of single tokens by the oracle with all entries."""
        return combined(oracle_logits(self.model, self.steps, StockCache(self.model))[1:])

    @cached_property
    def full(self) -> list[Tensor]:
        """Logits of the context and of single tokens by kvbench with the full cache."""
        return self.attached("full", self.steps)[0]

    @torch.no_grad()
    def attached(
        self, policy_name: str | Policy, chunks: Sequence[Tensor], token_mask: Tensor | None = None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the logits of consecutive chunks, and the entries kept of the first, with `kvbench.attach`."""
        budget = "full" if policy_name == "full" else BUDGET
        with kvbench.attach(self.model, policy_name, budget) as cache:
            arguments = {} if token_mask is None else {"attention_mask": token_mask}
            logits = [self.model(input_ids=chunks[0], **cache_inputs(self.model, cache), **arguments).logits]
            kept = cache.kept()
            logits += [self.model(input_ids=ids, **cache_inputs(self.model, cache)).logits for ids in chunks[1:]]
        return logits, kept

    def oracle(self, kept: Sequence[Tensor | None], chunks: Sequence[Tensor], mask: Tensor | None = None) -> Tensor:
        """Return the logits of later chunks by the oracle; refuse a comparison that could not fail.

        Raises:
            BlindError: kvbench evicts from other layers than those that hold all tokens, or too many entries are kept.
        """
        cache = StockCache(self.model, kept)
        logits = combined(oracle_logits(self.model, chunks, cache, mask)[1:])
        if sorted(cache.evicted_layers) != cache.full_layers:
            raise BlindError(f"evicts from layers {sorted(cache.evicted_layers)}, not {cache.full_layers}")
        tokens = chunks[0].numel() if mask is None else int(mask.sum())
        for layer_idx in cache.full_layers:
            layer_kept = kept[layer_idx]
            assert layer_kept is not None
            share = int(layer_kept.sum()) / (layer_kept.shape[1] * tokens)
            if share > BUDGET + 1 / CONTEXT:
                raise BlindError(f"layer {layer_idx} keeps {share:.2f} of its entries with a budget of {BUDGET}")
        return logits

    def evicts(self) -> bool:
        """Return whether any layer holds all tokens."""
        return bool(self.stock[1].full_layers)

    def prefill(self) -> float:
        """Compare the logits of the context with the full cache.

        Raises:
            UserError: kvbench refuses the model, or transformers itself cannot run it, which a run would say, too.
        """
        try:
            return difference(self.full[0], self.stock[0][0])
        except UserError:
            raise
        except Exception:  # the code of a family can raise anything
            measure_model(self.model)
            raise

    def decode(self) -> float:
        """Compare the logits of single steps with the full cache; the oracle must agree with the stock model."""
        stock_steps = combined(self.stock[0][1:])
        if difference(self.full_oracle, stock_steps) > TOLERANCE:
            raise BlindError("the oracle differs from the stock model")
        return difference(combined(self.full[1:]), stock_steps)

    def evicted(self) -> float:
        """Compare the logits of single steps after eviction by several policies."""
        errors = []
        refusals = []
        for policy_name in POLICIES:
            try:
                logits, kept = self.attached(policy_name, self.steps)
            except UserError as error:
                refusals.append(UserError(f"{policy_name.partition(':')[0]}: {error}"))
                continue
            expected = self.oracle(kept, self.steps)
            if difference(expected, self.full_oracle) < NOTICEABLE:
                raise BlindError(f"eviction by {policy_name} changes nothing")
            errors.append(difference(combined(logits[1:]), expected))
        if refusals:
            raise PartlyRefused(max(errors, default=None), refusals[0])
        return max(errors)

    def padded(self) -> float:
        """Compare a batch with padding on the left, with the full cache and after eviction."""
        contexts = torch.cat([self.context, _texts(1, CONTEXT, seed=7)])
        mask = torch.ones_like(contexts)
        mask[1, :PADDING] = 0
        contexts[1, :PADDING] = 0
        tails = torch.cat([self.tail, _texts(1, QUESTION + ANSWER, seed=8)])
        chunks = [contexts, *tails.split(1, 1)]
        full = combined(self.attached("full", chunks, mask)[0][1:])
        evicted = [self.attached(policy_name, chunks, mask) for policy_name in ANY_KEYS]
        stock_steps = combined(stock_logits(self.model, chunks, StockCache(self.model), mask)[1:])
        alone = [contexts[1:, PADDING:], *tails[1:].split(1, 1)]
        alone_steps = combined(stock_logits(self.model, alone, StockCache(self.model))[1:])
        stock_error = difference(stock_steps, torch.cat([combined(self.stock[0][1:]), alone_steps]))
        if stock_error > TOLERANCE:
            raise StockDiffersError("the stock model gives other logits with padding")
        errors = [difference(full, stock_steps)]
        for logits, kept in evicted:
            errors.append(difference(combined(logits[1:]), self.oracle(kept, chunks, mask)))
        return max(errors)

    def _check_chunks(self) -> None:
        """Raise if the stock model treats a chunk of tokens differently from the same tokens one by one."""
        chunk = stock_logits(self.model, [self.context, self.tail], StockCache(self.model))[1]
        stock_error = difference(chunk, combined(self.stock[0][1:]))
        if stock_error > TOLERANCE:
            raise StockDiffersError("the stock model gives a chunk other logits than its tokens one by one")

    def chunked(self) -> float:
        """Compare a question that is fed as one chunk after eviction."""
        question, answer = self.tail.split([QUESTION, ANSWER], 1)
        errors = []
        for policy_name in ANY_KEYS:
            logits, kept = self.attached(policy_name, [self.context, question, *answer.split(1, 1)])
            errors.append(difference(combined(logits[1:]), self.oracle(kept, self.steps)))
        if max(errors) > TOLERANCE:
            self._check_chunks()
        return max(errors)

    @torch.no_grad()
    def run(self) -> float:
        """Compare caches that share a prefill and are decoded in one batch, with a model that a run has loaded."""
        with tempfile.TemporaryDirectory() as folder:
            self.model.save_pretrained(folder)
            try:
                model = load_model(folder, None, torch.device("cpu"), torch.float32)
            except UserError as error:  # without the folder's name, which is new every time
                raise UserError(str(error).replace(folder, self.family.name)) from error
        policies = [policy(policy_name) for policy_name in ANY_KEYS]
        compressions = [Compression(one, Budget.parse(BUDGET), "context", 0) for one in policies]
        question, answer = self.tail.split([QUESTION, ANSWER], 1)
        with engine(model):
            prefix = Prefix(model, frozenset().union(*(one.needs for one in policies)))
            prefix.extend(self.context)
            caches = prefix.compress(compressions)
            kept = [cache.kept() for cache in caches]
            rows = len(caches)
            batch = Batch(model, caches, rows)
            logits = [batch.feed_all([question[0].tolist()] * rows, QUESTION)]
            logits += [batch.feed_all([[token_id]] * rows, 1) for token_id in answer[0].tolist()]
        expected = torch.cat([self.oracle(row_kept, self.steps) for row_kept in kept])
        error = difference(combined(logits), expected)
        if error > TOLERANCE:
            self._check_chunks()
        return error

    @torch.no_grad()
    def decoding(self) -> float:
        """Compare the logits of single steps, if entries are evicted at every step."""
        logits, kept = [], []
        with kvbench.attach(self.model, DECODING, DECODING_BUDGET, moment="decode") as attached_cache:
            for ids in self.steps:
                logits.append(self.model(input_ids=ids, **cache_inputs(self.model, attached_cache)).logits)
                kept.append(attached_cache.kept())
        cache = StockCache(self.model)
        expected = []
        with oracle_attention(self.model, cache):
            for ids, cache.kept in zip(self.steps, [[], *kept[:-1]], strict=True):
                expected += stock_logits(self.model, [ids], cache)
        for layer_idx in cache.full_layers:
            first, last = kept[0][layer_idx], kept[-1][layer_idx]
            if first is None or last is None or not bool((first & ~last[..., :CONTEXT]).any()):
                raise BlindError(f"layer {layer_idx} evicts nothing while decoding")
        return difference(combined(logits[1:]), combined(expected[1:]))

    def observed(self) -> float:
        """Compare attention weights and surprisal as policies see them."""
        Recorder.records = {}
        _, kept = self.attached(RECORDER, [self.context])
        cache = StockCache(self.model)
        oracle_logits(self.model, [self.context], cache)
        layers = [layer_idx for layer_idx, layer_kept in enumerate(kept) if layer_kept is not None]
        if sorted(Recorder.records) != [*range(len(cache.full_layers))]:
            raise BlindError(f"policies see layers {sorted(Recorder.records)} of {len(cache.full_layers)}")
        log_likelihoods = self.stock[0][0][:, :-1].log_softmax(-1)
        surprisal = -log_likelihoods.gather(-1, self.context[:, 1:, None])[..., 0]
        errors = []
        for layer, layer_idx in enumerate(layers):
            weights = cache.weights[layer_idx]
            last_weights = weights[:, :, -OBSERVED:]
            expected = (last_weights, weights.sum(2), last_weights.sum(2), surprisal)
            for seen, tensor in zip(Recorder.records[layer], expected, strict=True):
                errors.append(float((seen - tensor).abs().max()))
        return max(errors)

    def gates(self) -> float:
        """Compare the next-token loss of retention gates that forget nothing; a step must give them a gradient."""
        texts = _texts(1, CONTEXT, seed=9)
        supervised = torch.zeros_like(texts, dtype=torch.bool)
        supervised[:, CONTEXT // 2 : -1] = True
        method = get(TRAINERS, "trimkv")
        sizes = {"length": CONTEXT, "capacity": CONTEXT // 4, "hidden_dim": 16, "checkpointing": False}
        for bias, is_open in ((60.0, True), (1.0, False)):
            settings = complete(method, self.family.name, CONTEXT, {**sizes, "bias": bias})
            network = self.family.build()
            with torch.random.fork_rng():
                torch.manual_seed(0)
                gates = method.build(model_info(network), decoder_of(network).config, settings)
            losses = Student(network, gates, method, settings)(texts, supervised)
            if is_open:
                open_loss = float(losses["ntp"])
                continue
            losses["loss"].backward()
            gradients = [parameter.grad for parameter in gates.parameters()]
            if not any(gradient is not None and bool(gradient.ne(0).any()) for gradient in gradients):
                raise BlindError("no gate has a gradient")
            if not all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients):
                raise BlindError("a gate's gradient is not finite")
        with torch.no_grad():
            stock_logits_ = self.model(input_ids=texts).logits[0, :-1].float()
        learned = supervised[0, :-1]
        stock_loss = float(F.cross_entropy(stock_logits_[learned], texts[0, 1:][learned]))
        return abs(open_loss - stock_loss)


class PartlyRefused(Exception):
    """Some policies are refused.

    Args:
        error: Largest error of the others; None if there are none.
        refusal: The first refusal.
    """

    def __init__(self, error: float | None, refusal: UserError) -> None:
        super().__init__(str(refusal))
        self.error = error


@dataclass(frozen=True)
class Recorder(Score):
    """Records what policies observe of every layer, and keeps the newest entries."""

    name: ClassVar[str] = "recorder"
    records: ClassVar[dict[int, tuple[Tensor, ...]]] = {}

    @property
    def needs(self) -> frozenset[Need]:
        """Queries of a window, accumulated attention of all queries and of the window's, and surprisal."""
        return frozenset({Queries(OBSERVED), AttentionMass(), AttentionMass(OBSERVED), Surprisal()})

    def score(self, v: View) -> Scores:
        """Score the entries of one layer, float32 `[B, H, n]`."""
        accumulated, of_window = v.obs[AttentionMass()].clone(), v.obs[AttentionMass(OBSERVED)].clone()
        # The first token has no prediction.
        self.records[v.layer] = v.window_attention(OBSERVED), accumulated, of_window, v.obs[Surprisal()][:, 0, 1:]
        return Scores(v.position.float(), protect_nothing(v))


RECORDER = Policy(name="recorder", score=Recorder(), allocate=Uniform(), select=TopK())


def outcome_of(check: Callable[[], float]) -> Outcome:
    """Run a check."""
    try:
        return Outcome(error=check())
    except PartlyRefused as error:
        if error.error is None:
            return Outcome(refusal=str(error))
        return Outcome(error=error.error, note=str(error))
    except UserError as error:
        return Outcome(refusal=str(error))
    except StockDiffersError as error:
        return Outcome(note=str(error))
    except Exception as error:  # a difference like any other
        first_line = str(error).strip().partition("\n")[0]
        return Outcome(failure=f"{type(error).__name__}: {first_line}")


def examine(family: Family) -> FamilyResult:
    """Run all checks of a family; a refused prefill is refused everywhere."""
    start = time.perf_counter()
    checks = Checks(family)
    outcomes = {"prefill": outcome_of(checks.prefill)}
    for column in COLUMNS[1:]:
        is_refused = bool(outcomes["prefill"].refusal)
        outcomes[column] = outcomes["prefill"] if is_refused else outcome_of(getattr(checks, column))
    return FamilyResult(family.name, family.kind, round(time.perf_counter() - start, 2), **outcomes)
