"""What is compared with kvpress, row by row; both sides of `kvpress_agreement` read it.

Imports neither kvbench nor kvpress, which live in different environments.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

CHUNKS = 8
"""Chunks of replays and of non-causal attention are this many windows long."""
CHUNK = 10
"""Tokens of the chunks that are kept or evicted whole, or that each keep their part."""
SHARES = (0.2, 0.35, 0.5, 0.8)
LEAST = 13
"""Smallest budget, more than the 12 tokens that Compactor protects."""
SINKS = 4
"""Sinks of heads and layers that otherwise keep recent tokens alone."""
STEPS = 3
"""Windows of tokens that are decoded, one by one."""

Case = dict[str, Any]
Moment = Literal["context", "question", "decode", "decode_at_budget", "turns", "chunked"]


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        press: The press, as a user of kvpress writes it.
        spelling: The policy here. `{w}`, `{h}`, `{k}` and `{c}` are the case's window, half of it,
            its kernel and its chunk; other names are those of `Case`.
        moment: When kvbench cuts. `decode_at_budget`: the prompt is as long as the budget.
        counts: Whether kvpress decides how many entries every head keeps, and only the choice of
            entries is compared.
        unit: What the budget counts: entries, or heads or layers that keep everything.
        match: By what kvpress' entries are found again: keys and values, keys alone if it changes
            values, or `rotated` if it moves keys to adjacent positions.
        merges: Whether the keys and values that stay must be the same, too.
        reason: Why the press may keep different entries; kvbench must then keep, and merge, the
            same as the press without this difference (`kvpress_mended`). "" if there is none.
    """

    press: str
    spelling: str
    moment: Moment = "context"
    counts: bool = False
    unit: Literal["entries", "heads", "layers"] = "entries"
    match: Literal["both", "keys", "rotated"] = "both"
    merges: bool = False
    reason: str = ""

    @property
    def setting(self) -> bool:
        """Whether the spelling depends on the case's window."""
        return "{w}" in self.spelling or "{c}" in self.spelling


APART = "the window is kept by itself; in kvpress it lifts the chunks that it reaches into"
SNAP = "window={w}:kernel={k}:pool=avg"
EXPECTED = "expected_attention"
ROWS: dict[str, Row] = {
    "random": Row("RandomPress", "random", reason="other noise: what both keep is chance"),
    "streaming_llm": Row("StreamingLLMPress", "streaming_llm"),
    "knorm": Row("KnormPress", "knorm"),
    "keydiff": Row("KeyDiffPress", "keydiff"),
    "snapkv": Row("SnapKVPress", f"snapkv:{SNAP}"),
    "tova": Row("TOVAPress", "tova", reason="the newest token stays by its own attention, not in any case"),
    "observed_attention": Row("ObservedAttentionPress", "roco:b_std=0:window=0:sinks=0"),
    "expected_attention": Row("ExpectedAttentionPress", EXPECTED),
    "expected_attention eps": Row("ExpectedAttentionPress(epsilon=0.01)", f"{EXPECTED}:eps=0.01"),
    "expected_attention measured": Row("ExpectedAttentionStatsPress", f"{EXPECTED}:statistics={{statistics}}"),
    "lagkv": Row("LagKVPress", "lagkv:lag={w}:sinks=4"),
    "qfilters": Row("QFilterPress", "qfilters:filters={filters}"),
    "leverage": Row("LeverageScorePress", "knorm:score=leverage:sketch=0"),
    "non_causal": Row("NonCausalAttnPress", "knorm:score=non_causal:variant=release:chunk={c}"),
    "compactor": Row("CompactorPress", "compactor:variant=release:blend=0.35:sketch=0:chunk={c}"),
    "compactor default": Row("CompactorPress", "compactor:variant=release"),
    "leverage default": Row("LeverageScorePress", "random:score=leverage"),
    "curdkv default": Row("CURPress(use_random_leverage=True, use_local_approximation=False)", "curdkv"),
    "curdkv": Row("CURPress", "curdkv:sketch=0:local=16"),
    "finch": Row(
        "FinchPress",
        "finch",
        moment="question",
        match="rotated",
        reason="a query at position `q` counts `q + 1` times (the authors' code), not `q` times",
    ),
    "finch chunks": Row(
        "FinchPress(chunk_length)",
        "finch:select=every_chunk:chunk_length={c}",
        moment="question",
        counts=True,
        match="rotated",
        reason="`q + 1`, and the question is kept before chunks share the rest; kvpress takes it "
        "from the quota of the last chunk",
    ),
    "kvzip": Row("KVzipPress", "kvzip:replay={c}"),
    "kvzip layerwise": Row("KVzipPress(layerwise=True)", "kvzip:replay={c}:allocate=head_adaptive:safeguard=0"),
    "kvzip plus": Row("KVzipPress(kvzip_plus_normalization=True)", "kvzip:replay={c}:plus=true"),
    "kvzap": Row("KVzapPress", "kvzap:window=0:allocate=uniform:gates={mlp}"),
    "kvzap threshold": Row("DMSPress(KVzapPress)", "kvzap:window={w}:gates={mlp}"),
    "kvzap linear": Row("DMSPress(KVzapPress(model_type='linear'))", "kvzap:window={w}:gates={linear}"),
    "knorm threshold": Row("DMSPress(KnormPress)", "knorm:allocate=global"),
    "adakv": Row("AdaKVPress(SnapKVPress)", f"adakv:{SNAP}"),
    "adakv knorm": Row("AdaKVPress(KnormPress)", "knorm:allocate=head_adaptive"),
    "adakv expected": Row("AdaKVPress(ExpectedAttentionPress)", f"{EXPECTED}:allocate=head_adaptive"),
    "critical_snapkv": Row("CriticalKVPress(SnapKVPress)", f"critical_snapkv:variant=release:{SNAP}"),
    "critical expected": Row(
        "CriticalKVPress(ExpectedAttentionPress)",
        f"{EXPECTED}:score.norm=none:select=two_stage:variant=release",
    ),
    "criticalkv": Row("CriticalAdaKVPress(SnapKVPress)", f"criticalkv:variant=release:{SNAP}"),
    "criticalkv floor": Row(
        "CriticalAdaKVPress(SnapKVPress, alpha_safeguard=0.5, first_stage_ratio=0.25)",
        f"criticalkv:variant=release:safeguard=0.5:first_stage=0.25:{SNAP}",
    ),
    "criticalkv expected": Row(
        "CriticalAdaKVPress(ExpectedAttentionPress)",
        f"{EXPECTED}:score.norm=none:allocate=head_adaptive:select=two_stage:variant=release",
    ),
    "pyramidkv": Row(
        "PyramidKVPress",
        f"pyramidkv:{SNAP}",
        reason="every layer first keeps its window and the pyramid divides the rest (the authors' "
        "code); in kvpress the pyramid divides everything",
    ),
    "pyramidkv counts": Row("PyramidKVPress", f"snapkv:{SNAP}", counts=True),
    "per_layer": Row("PerLayerCompressionPress(SnapKVPress)", f"snapkv:{SNAP}", counts=True),
    "lukv": Row("LUKVPress(KnormPress)", "knorm", counts=True),
    "lukv expected": Row("LUKVPress(ExpectedAttentionPress)", EXPECTED, counts=True),
    "duo_attention": Row(
        "DuoAttentionPress",
        "duo_attention:sinks={sinks}:recent={recent}:profile={profile}",
        unit="heads",
    ),
    "simlayerkv": Row(
        "SimLayerKVPress",
        "simlayerkv:sinks={sinks}:recent={recent}:window=1",
        unit="layers",
        reason="kvpress leaves out the newest token's attention to itself, which counts in the "
        "authors' code, and measures one more recent token than it keeps",
    ),
    "chunkkv knorm": Row("ChunkKVPress(KnormPress)", f"knorm:select=chunk:chunk_length={CHUNK}", counts=True),
    "chunkkv snapkv": Row(
        "ChunkKVPress(SnapKVPress)",
        f"snapkv:{SNAP}:select=chunk:chunk_length={CHUNK}",
        counts=True,
        reason=APART,
    ),
    "chunkkv": Row(
        "ChunkKVPress(SnapKVPress(kernel_size=1))",
        "chunkkv:window={w}",
        counts=True,
        reason=APART,
    ),
    "chunkkv twenty": Row(
        "ChunkKVPress(SnapKVPress)",
        f"snapkv:{SNAP}:select=chunk:chunk_length=20",
        counts=True,
        reason=APART,
    ),
    "chunk knorm": Row("ChunkPress(KnormPress)", f"knorm:select=every_chunk:chunk_length={CHUNK}", counts=True),
    "chunk keydiff": Row(
        "ChunkPress(KeyDiffPress)",
        f"keydiff:select=every_chunk:chunk_length={CHUNK}",
        counts=True,
        reason="keys are compared with the mean key of the context; in kvpress with their chunk's",
    ),
    "block knorm": Row("BlockPress(KnormPress)", "knorm"),
    "block keydiff": Row(
        "BlockPress(KeyDiffPress)",
        "keydiff",
        moment="chunked",
        reason="a real chunked prefill: from the second layer on, hidden states feel the evictions",
    ),
    "rerotated": Row("KeyRerotationPress(SnapKVPress)", f"snapkv:{SNAP}", match="rotated"),
    "merging": Row(
        "MergingPress(SnapKVPress)",
        f"snapkv:{SNAP}:merge=ema",
        match="keys",
        merges=True,
        reason="keys and values are merged where the similarity reaches its mean, with weights by "
        "similarity; kvpress merges all values, with weights by their norms, and no key",
    ),
    "decoding": Row("DecodingPress(KnormPress)", "knorm:buffer={w}", moment="decode_at_budget"),
    "decoding keydiff": Row("DecodingPress(KeyDiffPress)", "keydiff:buffer={w}", moment="decode_at_budget"),
    "decoding snapkv": Row(
        "DecodingPress(SnapKVPress)",
        "snapkv:window={h}:kernel={k}:pool=avg:buffer={w}",
        moment="decode_at_budget",
        reason="kvpress turns all queries of the window to the newest position and, after a cut, "
        "pools over entries in the order of their scores",
    ),
    "prefill_decoding": Row(
        "PrefillDecodingPress(KeyDiffPress, DecodingPress(KeyDiffPress))",
        "keydiff:buffer={w}",
        moment="decode",
    ),
    "ratio_decoding": Row("CompressionRatioDecodingPress(KeyDiffPress)", "keydiff", moment="turns"),
    "cam": Row(
        "CAMPress(KnormPress)",
        "knorm:buffer={w}:merge=value",
        moment="decode_at_budget",
        match="keys",
        merges=True,
        reason="every head evicts for itself, all that came since the last cut may be merged, into "
        "the kept ones among the next 32 tokens, and the prompt's attention counts; in kvpress all "
        "heads of a layer evict the same tokens, by their mean score, as many as were decoded are "
        "merged, into the next 32 kept tokens, and attention counts from the first decoded token",
    ),
}

DRAWN = ("random", "compactor default", "leverage default", "curdkv default", "cam")
"""Rows in which both sides use what kvbench has drawn."""

NOT_RUN = {
    "EntropyGatedChunkKVPress": "no counterpart: there is no entropy gate here",
    "ThinKPress": "prunes channels, not entries: `benchmarks/kvpress_channels.py`, 72 cells alike",
    "ComposedPress": "with SnapKV and ThinK in `benchmarks/kvpress_channels.py`; two scores in a "
    "row have no counterpart",
    "FastKVzipPress": "no counterpart: its gates are published for a few models only",
    "KVgradPress": "no counterpart: it needs a backward pass",
    "CapPress": "no counterpart yet",
    "KVComposePress": "no counterpart yet",
    "RestoreKVPress": "no counterpart: it adds trained tokens to the cache",
}
"""Presses that no row runs, with the reason."""

BASES = ("BasePress", "ScorerPress")
"""What other presses derive from."""


def presses_in(text: str) -> set[str]:
    """Names of presses in a text."""
    return set(re.findall(r"\w+Press\b", text))


def compared() -> set[str]:
    """Names of all presses that a row or `NOT_RUN` names."""
    return presses_in(" ".join(row.press for row in ROWS.values())) | set(NOT_RUN)


def spelled(row: Row, case: Case) -> str:
    """The policy of a row."""
    window = case["window"]
    short = {"w": window, "h": window // 2, "k": case["kernel"], "c": CHUNKS * window}
    return row.spelling.format(**short, **{k: v for k, v in case.items() if k not in short})


def spread(case: Case) -> int:
    """Entries by which a head that keeps everything exceeds one that keeps sinks and recent ones.

    A multiple of 24, so that a number of whole heads or layers is a budget without remainder on
    all models here.
    """
    return int(0.75 * len(case["ids"])) // 24 * 24


def budgets(row: Row, case: Case) -> list[float]:
    """Budgets of a row: entries per head on average, or shares where kvpress takes only those."""
    length, window = len(case["ids"]), case["window"]
    if row.moment == "turns":
        return [_share(length, window, share) for share in SHARES]
    if row.unit != "entries":
        units = case["layers"] * (case["kv_heads"] if row.unit == "heads" else 1)
        floor, more = length - spread(case), spread(case)
        whole = sorted({max(1, int(share * units)) for share in SHARES})
        return [floor + count * more // units for count in whole]
    # kvbench leaves a prompt whole that fits the budget and the buffer.
    most = length - (STEPS + 1) * window if row.moment == "decode" else length
    return sorted({min(most, max(2 * window, LEAST, int(x * length))) for x in SHARES})


def _share(length: int, window: int, about: float) -> float:
    """A share near `about` that kvbench, too, rounds down at all cuts."""
    totals = [length - step * window for step in range(STEPS)]
    for more in range(1000):
        share = round(about + more / 1000, 3)
        if all(0.001 < share * total % 1 < 0.499 for total in totals):
            return share
    raise ValueError(f"no share near {about} is rounded alike at {totals}")


def forwards(row: Row, case: Case, budget: float) -> list[tuple[int, int]]:
    """First and last token of every forward of kvbench, and of kvpress unless `chunked`."""
    length, window = len(case["ids"]), case["window"]
    if row.moment == "chunked":
        start, size = int(budget), block(case, budget)
        return [(0, start), *((a, min(a + size, length)) for a in range(start, length, size))]
    if row.moment in ("context", "question"):
        return [(0, length)]
    start = int(budget) if row.moment == "decode_at_budget" else length - STEPS * window
    end = min(length, start + STEPS * window)
    return [(0, start), *((a, a + 1) for a in range(start, end))]


def block(case: Case, budget: float) -> int:
    """Tokens of a block of a chunked prefill."""
    size = 2 * case["window"]
    while (len(case["ids"]) - int(budget)) % size == 1:  # one token alone would be decoded
        size += 1
    return size
