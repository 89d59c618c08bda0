"""Do kvbench and kvpress keep the same entries? `python -m benchmarks.kvpress_agreement --help`.

NVIDIA's kvpress (Apache-2.0) implements several of the same methods, written by others. Both get
the same weights (random Llama and Qwen3 with 4 query heads per KV head, and the shipped reference
model) and the same tokens; what each keeps is compared entry by entry. kvpress pins an older
transformers, so it runs in an environment of its own; the two exchange files (JSON, npz).

    python3 -m venv .venv-kvpress && .venv-kvpress/bin/pip install 'torch==2.13.0' 'kvpress==0.5.5'
    python -m benchmarks.kvpress_agreement --kvpress-python .venv-kvpress/bin/python

How kvpress' settings are ours:

- `compression_ratio` is the share REMOVED: it keeps `int(T * (1 - ratio))` entries. Budgets are
  given in tokens here, `ratio = 1 - (b + 1/2) / T`, so that both keep `b` whatever is rounded.
- `SnapKVPress(window_size=w, kernel_size=k)` is `snapkv:window=w:kernel=k:pool=avg`. It pools per
  query head and averages afterwards, which is the same for `avg` (and would not be for `max`).
- `AdaKVPress(SnapKVPress)` is `adakv`; `CriticalKVPress(SnapKVPress)` is `critical_snapkv`;
  `CriticalAdaKVPress(SnapKVPress)` is `criticalkv:variant=release`. The row `criticalkv floor` has
  `alpha_safeguard=0.5, first_stage_ratio=0.25`: heads at their floor have no second stage, which is
  where the release and the paper part.
- `LagKVPress` is `lagkv:sinks=4`, `ExpectedAttentionPress` is `expected_attention`, `CURPress` is
  `curdkv:sketch=0:local=16`, and `QFilterPress` is `qfilters`, both with the same filters.
- `ExpectedAttentionStatsPress` is `expected_attention:statistics=FOLDER`, both with the same
  statistics. `ObservedAttentionPress` is `roco:b_std=0:window=0:sinks=0`.
- `NonCausalAttnPress` is `score=non_causal:variant=release`, `LeverageScorePress` is
  `score=leverage`, and `CompactorPress(blending=0.35)` is `compactor:blend=0.35:variant=release`.
  Leverage draws a random projection on either side, so here neither projects (`sketch=0`; kvpress
  gets the identity for `torch.randn`).
- A `ScorerPress` removes entries from the cache (found again here by comparing K and V bit by bit);
  AdaKV's presses leave them in and note `masked_key_indices` on the attention module.

Where kvpress differs by design, so that it is kept out of the comparison:

- The window (and so the last token) is protected by a score of `max + 1`: where it does not fit the
  budget any of its tokens may go. Here the oldest go first. In stage 2 of `CriticalKVPress` that
  score is multiplied by the value's norm as well, so that beyond stage 1's share the window is not
  sure to stay. Budgets here are at least twice the window.
- `CompactorPress` gives its 8 sinks and 4 recent tokens the largest score of the others, and
  `LagKVPress` its sinks and its window 1: where they do not fit, any of them may go.
- `LagKVPress` scores are ranks within partitions, so the best of every partition tie. Of equals the
  more recent stays here; `topk` does not say.
- `StreamingLLMPress` below 5 entries keeps some of the sinks and not the last token. Budgets here
  are at least 5.
- AdaKV's floor is at least one entry a head; `floor(0.2 * b)` here (they differ below `b = 5`).
- The prompt must be longer than the window.
- `TOVAPress` always keeps the newest token; `tova` does so if its own attention is large enough.
- `SimLayerKVPress` has no budget: a threshold says which layers are lazy, and the newest token's
  attention to itself does not count. `simlayerkv` fills the least lazy layers until the budget is
  spent.
- Padding and batches are not seen by its scores, so all is compared at B = 1.

A difference is a `tie` where kvpress' own scores, put through kvbench's allocator and selector,
give what kvpress kept while the two scores differ by rounding alone (1e-5 of a head's largest), or
where the entries that were exchanged have equal scores. Anything else is `real`, and the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import kvpress_side
from benchmarks.kvpress_side import CHUNKS
from benchmarks.two_sides import KVPRESS, environment

LENGTHS = (63, 100, 257, 512)
SHARES = (0.2, 0.35, 0.5, 0.8)
WINDOWS = {63: (5, 5), 100: (8, 7), 257: (16, 7), 512: (32, 5)}
"""SnapKV's window and kernel at each length; twice the window fits the smallest budget."""
ROUNDING = 1e-5

SNAP = "window={w}:kernel={k}:pool=avg"
POLICIES = {
    "streaming_llm": "streaming_llm",
    "knorm": "knorm",
    "keydiff": "keydiff",
    "snapkv": f"snapkv:{SNAP}",
    "adakv": f"adakv:{SNAP}",
    "critical_snapkv": f"critical_snapkv:variant=release:{SNAP}",
    "criticalkv": f"criticalkv:variant=release:{SNAP}",
    "criticalkv floor": f"criticalkv:variant=release:safeguard=0.5:first_stage=0.25:{SNAP}",
    "lagkv": "lagkv:lag={w}:sinks=4",
    "expected_attention": "expected_attention",
    "expected_attention measured": "expected_attention:statistics={statistics}",
    "observed_attention": "roco:b_std=0:window=0:sinks=0",
    "tova": "tova",
    "curdkv": "curdkv:sketch=0:local=16",
    "leverage": "knorm:score=leverage:sketch=0",
    "non_causal": "knorm:score=non_causal:variant=release:chunk={c}",
    "compactor": "compactor:variant=release:blend=0.35:sketch=0:chunk={c}",
    "qfilters": "qfilters:filters={filters}",
}
LEAST = 13
"""Smallest budget, more than the 12 tokens that Compactor protects."""


def cases(
    folders: dict[str, str],
    filters: dict[str, str],
    statistics: dict[str, str],
    presses: list[str],
) -> list[dict[str, Any]]:
    """Every model with a context of every length: what both sides are told."""
    from kvbench.reference import samples
    from scripts.reference_model import evaluate

    rng = np.random.default_rng(0)
    made = []
    for model, folder in folders.items():
        for length in LENGTHS:
            if model == "reference":
                words = evaluate.case("multikey_1", max(length + 32, 512), rng).prompt[:length]
                ids = [samples.IDS[word] for word in words]
            else:
                ids = rng.permutation(997)[:length].tolist()
            window, kernel = WINDOWS[length]
            budgets = [max(2 * window, LEAST, int(share * length)) for share in SHARES]
            made.append(
                {
                    "model": model,
                    "folder": folder,
                    "presses": presses,
                    "filters": filters[model],
                    "statistics": statistics[model],
                    "ids": ids,
                    "window": window,
                    "kernel": kernel,
                    "budgets": budgets,
                }
            )
    return made


# --- kvbench's side -------------------------------------------------------------------------------


def random_models(folder: Path) -> dict[str, str]:
    """Save a Llama and a Qwen3 of random weights as safetensors; give all models' folders."""
    from kvbench import reference  # before transformers: it copes with a torchvision of any build

    shape: dict[str, Any] = {
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "initializer_range": 0.15,
    }
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**shape)),
    }
    for name, model in made.items():
        for weight in model.parameters():
            if weight.dim() == 1:  # norms of weight 1 would make all of Qwen3's keys equally long
                weight.data += 0.3 * torch.randn_like(weight)
        for layer in model.model.layers:
            # Every KV head attends more sharply than the one before, so that shares differ and
            # floors bind (without effect where queries are normed, as in Qwen3).
            query = layer.self_attn.q_proj.weight
            query.data *= 2.0 ** torch.arange(4).repeat_interleave(len(query) // 4)[:, None]
        model.save_pretrained(folder / name)
    return {**{name: str(folder / name) for name in made}, "reference": str(reference.path())}


def summaries_of(models: dict[str, str], folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Save random Q-filters and query statistics for every model; give their folders."""
    from transformers import AutoConfig

    from kvbench.profiles.summaries import FILTERS, STATISTICS, SummaryNotes

    filters, statistics = {}, {}
    for name, path in models.items():
        config = AutoConfig.from_pretrained(path)
        layers, dim = config.num_hidden_layers, config.head_dim
        heads, queries = config.num_key_value_heads, config.num_attention_heads
        draw = torch.Generator().manual_seed(0)
        drawn = torch.randn(layers, heads, dim, generator=draw)
        filters[name] = str(folder / f"{name}-filters")
        FILTERS.save(Path(filters[name]), {"q_filters": drawn}, SummaryNotes())
        mean = torch.randn(layers, queries, dim, generator=draw)
        root = torch.randn(layers, queries, dim, dim, generator=draw) / dim
        statistics[name] = str(folder / f"{name}-statistics")
        made = {"query_mean": mean, "query_cov": root @ root.mT}
        STATISTICS.save(Path(statistics[name]), made, SummaryNotes())
    return filters, statistics


def difference(
    case: dict[str, Any], model: Any, name: str, budget: int, kept: np.ndarray, scores: np.ndarray
) -> tuple[int, str, float]:
    """Compare one cell.

    Returns:
        Entries that kvpress keeps and kvbench does not; `""`, `tie`, `real`, or `newest` where
        `TOVAPress` has kept the newest token and nothing else differs; the largest difference of
        the scores, relative to the head's largest.
    """
    import kvbench
    from kvbench.plugin import Need, Score, Scores, View

    ids = torch.tensor([case["ids"]])
    window = case["window"]
    spelled = POLICIES[name].format(
        w=window,
        k=case["kernel"],
        c=CHUNKS * window,
        **{x: case[x] for x in ("filters", "statistics")},
    )
    policy = kvbench.policy(spelled)
    own = policy.score
    assert own is not None
    layers = kvbench.kept(model, ids, policy, budget)
    ours = np.stack([m[0].numpy() for m in layers if m is not None])
    theirs = torch.from_numpy(scores)
    error = 0.0

    class Given(Score):
        """kvpress' scores with kvbench's protection."""

        @property
        def needs(self) -> frozenset[Need]:
            return own.needs

        def score(self, v: View) -> Scores:
            nonlocal error
            found = own.score(v)
            mine = found if isinstance(found, Scores) else Scores(found, torch.zeros_like(v.col))
            free = mine.protect <= 0
            if name == "tova":
                free[..., -1] = False
            given = theirs[v.layer][None]
            if name == "streaming_llm":  # it scores 1 or 0
                return Scores(given, torch.zeros_like(mine.protect))
            scale = given.masked_fill(~free, 0.0).abs().amax(-1, keepdim=True)
            error = max(error, float(((mine.value - given) / scale).abs()[free].max()))
            return Scores(given.masked_fill(~free, 0.0), mine.protect)

    again = kvbench.kept(model, ids, kvbench.policy(policy, score=Given()), budget)
    same_scores = np.stack([m[0].numpy() for m in again if m is not None])
    missing = int((kept & ~ours).sum())
    if not missing:
        return 0, "", error
    if name == "tova" and not (kept & ~ours)[..., :-1].any():
        return missing, "newest", error
    tie = error <= ROUNDING and (np.array_equal(same_scores, kept) or swapped(ours, kept, scores))
    return missing, "tie" if tie else "real", error


def swapped(ours: np.ndarray, kept: np.ndarray, scores: np.ndarray) -> bool:
    """Whether only entries of one score were exchanged: in each head, or in a layer as a whole."""

    def even(mine: np.ndarray, theirs: np.ndarray, value: np.ndarray) -> bool:
        found = value[mine != theirs]
        return bool(mine.sum() == theirs.sum() and (not len(found) or np.ptp(found) == 0))

    for layer in zip(ours, kept, scores, strict=True):
        heads = [even(*head) for head in zip(*layer, strict=True)]
        if not (all(heads) or even(*layer)):
            return False
    return True


def compare(folder: Path) -> int:
    """Print the table; 1 if a difference is real."""
    from importlib.metadata import version

    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = np.load(folder / "kvpress.npz", allow_pickle=False)
    mine = ", ".join(f"{p} {version(p)}" for p in ("kvbench", "transformers", "torch"))
    print(f"{mine}  against  {', '.join(theirs['versions'])}\n")
    print("Entries kept otherwise of those kept, over all layers and heads, at each budget;")
    print("d(score): largest difference of the scores, relative to the head's largest.\n")
    print(f"{'policy':<28}{'model':<11}{'T':>4}  w/k    d(score)  b: different/kept ...")
    models: dict[str, Any] = {}
    total = {"cells": 0, "entries": 0, "tie": 0, "newest": 0, "real": 0}
    listed = json.loads((folder / "cases.json").read_text())
    for name in listed[0]["presses"]:
        for number, case in enumerate(listed):
            if case["folder"] not in models:
                models[case["folder"]] = AutoModelForCausalLM.from_pretrained(
                    case["folder"], dtype=torch.float32
                ).eval()
            columns, worst = [], 0.0
            for budget in case["budgets"]:
                kept = theirs[f"{number}/{name}/{budget}/kept"]
                scores = theirs[f"{number}/{name}/{budget}/scores"]
                model = models[case["folder"]]
                missing, kind, error = difference(case, model, name, budget, kept, scores)
                columns.append(f"{budget}: {missing}/{kept.sum()}{' ' + kind if kind else ''}")
                worst = max(worst, error)
                total["cells"] += 1
                total["entries"] += int(kept.sum())
                if kind:
                    total[kind] += missing
            setting = f"{case['window']}/{case['kernel']}" if "{" in POLICIES[name] else "-"
            print(
                f"{name:<28}{case['model']:<11}{len(case['ids']):>4}  {setting:<6} {worst:.0e}   "
                + "   ".join(columns)
            )
    print(
        f"\n{total['cells']} cells, {total['entries']} entries: "
        f"{total['tie']} differ by a tie, {total['newest']} by TOVA's newest token, "
        f"{total['real']} for real"
    )
    return int(total["real"] > 0)


def main() -> int:
    """Run both sides and compare them."""
    parser = argparse.ArgumentParser(description="Compare what kvbench and kvpress keep.")
    parser.add_argument("--kvpress-python", help="python of an environment with kvpress 0.5")
    parser.add_argument("--only", help="names of the table's first column, with commas")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",") if arguments.only else list(POLICIES)
    python = environment("benchmarks.kvpress_agreement", KVPRESS, arguments.kvpress_python)
    if python is None:
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = random_models(folder)
        listed = cases(models, *summaries_of(models, folder), chosen)
        (folder / "cases.json").write_text(json.dumps(listed))
        if subprocess.run([python, kvpress_side.__file__, name], check=False).returncode:
            return 2
        return compare(folder)


if __name__ == "__main__":
    sys.exit(main())
