"""The presses of the rows of `kvpress_agreement`; runs in kvpress' environment."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
from kvpress.presses.kvzap_press import KVzapModel
from safetensors.torch import load_file

from benchmarks import kvpress_mended as mended
from benchmarks.kvpress_rows import CHUNK, CHUNKS, ROWS, STEPS, Case, block, spread


@dataclass
class Run:
    """A press at one budget.

    Attributes:
        press: The press.
        scorer: The press whose scores are compared, or None.
        settle: Sets a threshold that lets the budget through, given the scores that a forward
            without eviction has noted, float32 `[L, H, T]`.
    """

    press: Any
    scorer: Any = None
    settle: Callable[[np.ndarray | None], None] | None = None


def run_of(name: str, case: Case, budget: float, head_dim: int, draws: mended.Draws, mend: bool = False) -> Run:
    """Make the press of a row at a budget; `mend`: without the reason why it may differ."""
    row, length, window = ROWS[name], len(case["ids"]), case["window"]
    chunk = {"chunk_size": CHUNKS * window}
    heads = case["layers"] * case["kv_heads"]
    # Half an entry more, so that `int` gives the budget whatever is rounded.
    total = length - STEPS * window if row.moment == "decode" else length
    ratio = max(0.0, 1 - (budget + 0.5) / total)

    def scored(press: Any, wrap: Callable[[Any], Any] = lambda press: press, ratio: float = ratio) -> Run:
        press.compression_ratio = ratio
        return Run(wrap(press), press)

    def unscored(press: Any, wrap: Callable[[Any], Any]) -> Run:
        return Run(scored(press, wrap).press)

    def snap() -> Any:
        return kvpress.SnapKVPress(window_size=window, kernel_size=case["kernel"])

    def expected(**settings: Any) -> Any:
        return kvpress.ExpectedAttentionPress(**settings)

    def zip_(**settings: Any) -> Run:
        # It prunes `int(L * H * T * ratio)` entries, or `int(H * T * ratio)` of every layer.
        exact = (heads * (length - budget) + 0.5) / (heads * length)
        press = kvpress.KVzipPress(compression_ratio=exact, **chunk, **settings)
        return Run(press, press)

    def finch(made: Any = kvpress.FinchPress, **settings: Any) -> Run:
        press = made(compression_ratio=ratio, **settings)
        press.delimiter_token_id = case["delimiter"]
        return Run(press, press)

    def above(press: Any, size: int) -> Run:
        outer = kvpress.DMSPress(press, threshold=float("-inf"), sliding_window_size=size)

        def settle(scores: np.ndarray | None) -> None:
            assert scores is not None
            older = np.sort(scores[..., : length - size], axis=None)
            outer.threshold = float(older[-heads * (int(budget) - size)])

        return Run(outer, press, settle)

    def decoding(press: Any, outer: Any = kvpress.DecodingPress, **more: Any) -> Any:
        return outer(press, compression_interval=window, target_size=int(budget), **more)

    def drawn() -> Any:
        press = mended.Drawn()
        press.noise = draws["noise"]
        return press

    # Not half an entry more, because the share is also the blend.
    exact = 1 - (budget + 1e-6) / total

    makers: dict[str, Callable[[], Run]] = {
        "random": lambda: scored(kvpress.RandomPress(seed=0)),
        "streaming_llm": lambda: scored(kvpress.StreamingLLMPress()),
        "knorm": lambda: scored(kvpress.KnormPress()),
        "keydiff": lambda: scored(kvpress.KeyDiffPress()),
        "snapkv": lambda: scored(snap()),
        "tova": lambda: scored(kvpress.TOVAPress()),
        "observed_attention": lambda: scored(kvpress.ObservedAttentionPress()),
        "expected_attention": lambda: scored(expected()),
        "expected_attention eps": lambda: scored(expected(epsilon=0.01)),
        "expected_attention measured": lambda: scored(with_statistics(case["statistics"])),
        "lagkv": lambda: scored(kvpress.LagKVPress(lag_size=window)),
        "qfilters": lambda: scored(with_filters(case["filters"])),
        "leverage": lambda: scored(kvpress.LeverageScorePress(sketch_dimension=head_dim)),
        "non_causal": lambda: scored(kvpress.NonCausalAttnPress(**chunk)),
        "compactor": lambda: scored(kvpress.CompactorPress(blending=0.35, sketch_dimension=head_dim, **chunk)),
        "compactor default": lambda: scored(
            mended.projected(kvpress.CompactorPress(), draws["gaussian48"]), ratio=exact
        ),
        "leverage default": lambda: scored(mended.projected(kvpress.LeverageScorePress(), draws["gaussian48"])),
        "curdkv": lambda: scored(kvpress.CURPress()),
        "curdkv default": lambda: scored(
            mended.projected(
                kvpress.CURPress(use_random_leverage=True, use_local_approximation=False),
                draws["gaussian20"],
            )
        ),
        "finch": finch,
        "finch chunks": lambda: finch(chunk_length=CHUNKS * window),
        "kvzip": zip_,
        "kvzip layerwise": lambda: zip_(layerwise=True),
        "kvzip plus": lambda: zip_(kvzip_plus_normalization=True),
        "kvzap": lambda: scored(with_surrogates(case["mlp"])),
        "kvzap threshold": lambda: above(with_surrogates(case["mlp"]), window),
        "kvzap linear": lambda: above(with_surrogates(case["linear"]), window),
        "knorm threshold": lambda: above(kvpress.KnormPress(), 0),
        "adakv": lambda: scored(snap(), kvpress.AdaKVPress),
        "adakv knorm": lambda: scored(kvpress.KnormPress(), kvpress.AdaKVPress),
        "adakv expected": lambda: scored(expected(), kvpress.AdaKVPress),
        "critical_snapkv": lambda: scored(snap(), kvpress.CriticalKVPress),
        "critical expected": lambda: scored(expected(use_vnorm=False), kvpress.CriticalKVPress),
        "criticalkv": lambda: scored(snap(), kvpress.CriticalAdaKVPress),
        "criticalkv floor": lambda: scored(
            snap(),
            functools.partial(kvpress.CriticalAdaKVPress, alpha_safeguard=0.5, first_stage_ratio=0.25),
        ),
        "criticalkv expected": lambda: scored(expected(use_vnorm=False), kvpress.CriticalAdaKVPress),
        "pyramidkv": lambda: scored(pyramid(case)),
        "pyramidkv counts": lambda: scored(pyramid(case)),
        "per_layer": lambda: scored(
            snap(),
            lambda press: kvpress.PerLayerCompressionPress(
                press, (ratio * np.linspace(0.5, 1.1, case["layers"])).tolist()
            ),
        ),
        "lukv": lambda: scored(kvpress.KnormPress(), lambda press: with_curves(press, case, ratio, sink=0)),
        "lukv expected": lambda: scored(expected(), lambda press: with_curves(press, case, ratio, sink=4)),
        "duo_attention": lambda: Run(duo(case, budget)),
        "simlayerkv": lambda: lazy(case, budget, kvpress.SimLayerKVPress),
        "chunkkv knorm": lambda: unscored(kvpress.KnormPress(), chunks(kvpress.ChunkKVPress)),
        "chunkkv snapkv": lambda: unscored(snap(), chunks(kvpress.ChunkKVPress)),
        "chunkkv": lambda: unscored(
            kvpress.SnapKVPress(window_size=window, kernel_size=1), chunks(kvpress.ChunkKVPress)
        ),
        "chunkkv twenty": lambda: unscored(snap(), kvpress.ChunkKVPress),
        "chunk knorm": lambda: unscored(kvpress.KnormPress(), chunks(kvpress.ChunkPress)),
        "chunk keydiff": lambda: unscored(kvpress.KeyDiffPress(), chunks(kvpress.ChunkPress)),
        "block knorm": lambda: unscored(kvpress.KnormPress(), lambda press: kvpress.BlockPress(press, 2 * window)),
        "block keydiff": lambda: unscored(
            kvpress.KeyDiffPress(), lambda press: kvpress.BlockPress(press, block(case, budget))
        ),
        "rerotated": lambda: scored(snap(), kvpress.KeyRerotationPress),
        "merging": lambda: scored(snap(), kvpress.MergingPress),
        "decoding": lambda: Run(decoding(kvpress.KnormPress())),
        "decoding keydiff": lambda: Run(decoding(kvpress.KeyDiffPress())),
        "decoding snapkv": lambda: Run(
            # It needs more decoded tokens than its window.
            decoding(kvpress.SnapKVPress(window_size=window // 2, kernel_size=case["kernel"]))
        ),
        "prefill_decoding": lambda: unscored(
            kvpress.KeyDiffPress(),
            lambda press: kvpress.PrefillDecodingPress(press, decoding(kvpress.KeyDiffPress())),
        ),
        "ratio_decoding": lambda: Run(
            kvpress.CompressionRatioDecodingPress(
                kvpress.KeyDiffPress(),
                compression_interval=window,
                target_compression_ratio=1 - budget,
            )
        ),
        "cam": lambda: Run(decoding(kvpress.KnormPress(), kvpress.CAMPress)),
    }
    repairs: dict[str, Callable[[], Run]] = {
        "random": lambda: scored(drawn()),
        "tova": lambda: scored(mended.Unforced()),
        "finch": lambda: finch(mended.Counted),
        "finch chunks": lambda: finch(mended.QuestionFirst, chunk_length=CHUNKS * window),
        "pyramidkv": lambda: scored(pyramid(case, mended.WindowFirst)),
        "simlayerkv": lambda: lazy(case, budget, mended.SeesItself),
        "chunkkv": lambda: unscored(kvpress.SnapKVPress(window_size=window, kernel_size=1), chunks(mended.WindowApart)),
        "chunkkv snapkv": lambda: unscored(snap(), chunks(mended.WindowApart)),
        "chunkkv twenty": lambda: unscored(snap(), mended.WindowApart),
        "chunk keydiff": lambda: unscored(mended.Anchored(), chunks(mended.WholeContext)),
        "block keydiff": lambda: Run(
            kvpress.DecodingPress(kvpress.KeyDiffPress(), compression_interval=1, target_size=int(budget))
        ),
        "merging": lambda: scored(snap(), mended.Averaging),
        "decoding snapkv": lambda: Run(decoding(mended.InOrder(window_size=window // 2, kernel_size=case["kernel"]))),
        "cam": lambda: Run(decoding(kvpress.KnormPress(), mended.OwnHeads, draws=draws["merging"])),
    }
    return (repairs if mend else makers)[name]()


def with_filters(folder: str) -> Any:
    """A press with Q-filters from a folder instead of the hub."""
    press = kvpress.QFilterPress()
    press.q_filters = load_file(Path(folder) / "model.safetensors")["q_filters"]
    press.post_init_from_model = lambda model: None
    return press


def with_statistics(folder: str) -> Any:
    """A press with mean and covariance of queries from a folder instead of the hub."""
    press = kvpress.ExpectedAttentionStatsPress()
    held = load_file(Path(folder) / "model.safetensors")
    press.mu, press.cov = held["query_mean"], held["query_cov"]
    return press


def with_surrogates(folder: str) -> Any:
    """A press with surrogates from the folder that was converted for kvbench."""
    press = kvpress.KVzapPress()
    press.kvzap_model = KVzapModel.from_pretrained(f"{folder}-source")
    press.post_init_from_model = lambda model: None
    return press


def with_curves(press: Any, case: Case, ratio: float, sink: int) -> Any:
    """LU-KV with heads that keep in proportion to the case's worth, instead of published curves."""
    outer = kvpress.LUKVPress(press, compression_ratio=ratio, sink=sink, window=0)
    worth = np.array(case["worth"])
    keep = np.clip((1 - ratio) * worth / worth.mean(), 0, 1)
    outer._budget_curves = np.broadcast_to(1 - keep, (99, *worth.shape)).copy()
    return outer


def pyramid(case: Case, made: Any = kvpress.PyramidKVPress) -> Any:
    """PyramidKV with the case's window."""
    return made(window_size=case["window"], kernel_size=case["kernel"])


def chunks(outer: Any) -> Callable[[Any], Any]:
    """Give a wrapper its chunk length."""
    return functools.partial(outer, chunk_length=CHUNK)


def duo(case: Case, budget: float) -> Any:
    """DuoAttention with the case's pattern instead of a published one."""
    worth = np.array(case["worth"])
    whole = round((budget - case["sinks"] - case["recent"]) * worth.size / spread(case))
    press = kvpress.DuoAttentionPress(head_compression_ratio=1 - whole / worth.size)
    press.load_attention_pattern = lambda model: (case["sinks"], case["recent"], worth)
    return press


class Noting:
    """A threshold that nothing exceeds and that notes what it is compared with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __lt__(self, value: float) -> bool:
        self.seen.append(value)
        return False


def lazy(case: Case, budget: float, made: Any) -> Run:
    """SimLayerKV with the threshold that leaves as many layers whole as the budget does."""
    # A lazy layer keeps `n_recent - n_last` recent tokens.
    press = made(n_recent=case["recent"] + 1, n_initial=case["sinks"])
    press.lazy_threshold = noted = Noting()

    def settle(scores: np.ndarray | None) -> None:
        layers = case["layers"]
        whole = round((budget - case["sinks"] - case["recent"]) * layers / spread(case))
        ordered = sorted(noted.seen)
        press.lazy_threshold = (ordered[whole - 1] + ordered[whole]) / 2

    return Run(press, settle=settle)
