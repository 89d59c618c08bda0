"""Do CAKE and DefensiveKV keep what an authors' release keeps? `--checkout FOLDER`.

The authors of DefensiveKV have published it with their presses for Layer-DefensiveKV and CAKE
(https://github.com/FFY0/DefensiveKV). The three are executed here from a checkout of theirs, on the
models and budgets of `kvpress_agreement`; none of their code is in kvbench. Their package needs a
GPU, so what the presses import from it is replaced: base classes by empty ones, and the Triton
kernel by the function in torch that they have for the same sum.

    git clone https://github.com/FFY0/DefensiveKV
    python -m benchmarks.release_agreement --checkout DefensiveKV

A release scores; which entries it keeps, it leaves to `topk`, which does not say what it does with
equals, and it gives all entries of stage 1 and of the window one score. So kvbench must keep all
entries that score more than the last one that the release keeps, and none that scores less. What
the release does otherwise:

- `layer_defensivekv`: that one score is the largest of each layer, so a protected entry of a layer
  of small scores can lose against any entry of another layer. Here the layers' scores are raised
  where an entry is protected, so that it cannot.
- `cake`: layer shares are cut down to whole numbers, and what is left is given to the first layers.
  Here they are rounded by largest remainder, so shares may differ by as many entries as there are
  layers; of each layer, the share that kvbench gives is filled by the release's scores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kvpress_cases import LENGTHS, WINDOWS, random_models
from benchmarks.kvpress_compare import ROUNDING

PRESSES = {
    "defensivekv": ("efficient_defensivekv_press", "EfficientDefensiveKVPress"),
    "layer_defensivekv": ("efficient_layer_defensivekv_press", "EfficientLayerDefensiveKVPress"),
    "cake": ("cake_global_press", "CakeGlobalPress"),
}
SHARES = (0.2, 0.35, 0.5, 0.8)


class Empty:
    """Stands for a base class of the release."""

    def __init__(self, compression_ratio: float, window_size: int) -> None:
        self.compression_ratio, self.window_size = compression_ratio, window_size
        self.kernel_size = 5


def press_of(checkout: Path, name: str) -> Any:
    """The press of a policy, from the file that defines it."""
    file, wanted = PRESSES[name]
    modules = {
        "kvpress.presses.efficient_ada_scorer_press": "EfficientAdaScorerPress",
        "kvpress.presses.efficient_ada_global_scorer_press": "EfficientAdaGlobalScorerPress",
        "kvpress.presses.cake_scorer_press": "CakeScorerPress",
        "kvpress.presses.base_press": "BasePress",
        "kvpress.presses.scorer_press": "ScorerPress",
        "kvpress.ops.vw_norm": "vw_l1norm",
        "kvpress.utils": "get_prerope_query_states",
    }
    held = {key: module for key, module in sys.modules.items() if key.startswith("kvpress")}
    for module, attribute in modules.items():
        made = types.ModuleType(module)
        setattr(made, attribute, queries if attribute.startswith("get") else Empty)
        sys.modules[module] = made
    for package in ("kvpress", "kvpress.presses", "kvpress.ops"):
        sys.modules[package] = types.ModuleType(package)
    own = types.ModuleType(f"release_{file}")
    sys.modules[own.__name__] = own
    path = checkout / "kvpress" / "presses" / f"{file}.py"
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), own.__dict__)
    for module in [*modules, "kvpress", "kvpress.presses", "kvpress.ops"]:
        del sys.modules[module]
    sys.modules.update(held)
    found = getattr(own, wanted)
    found.__init__ = Empty.__init__
    if name != "cake":
        found.vwl1norm_triton = found.vwl1norm
    return found


def queries(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Queries before RoPE, `[B, H_q, T, d]`."""
    made = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
    return (module.q_norm(made) if hasattr(module, "q_norm") else made).transpose(1, 2)


@torch.no_grad()
def release_scores(press: Any, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[float] | None]:
    """What a release scores all entries by, `[L, H, T]`, and CAKE's preferences of the layers.

    CAKE scores the entries before the window; those of the window are infinite.
    """
    seen: list[Any] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append((module, kwargs)), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    cache = model(ids).past_key_values
    for hook in hooks:
        hook.remove()
    scores, preferences = [], []
    for layer, (module, kwargs) in zip(cache.layers, seen, strict=True):
        heads, tokens = layer.keys.shape[1:3]
        metadata = types.SimpleNamespace(head_lens=[tokens] * heads, bsz=1, num_key_value_heads=heads)
        more = {"metadata": metadata, "position_embeddings": kwargs["position_embeddings"]}
        found = press.score(module, kwargs["hidden_states"], layer.keys, layer.values, None, more)
        if isinstance(found, tuple):
            preferences.append(float(found[1]))
            found = torch.nn.functional.pad(found[0], (0, press.window_size), value=float("inf"))
        scores.append(found.view(heads, tokens))
    return torch.stack(scores), preferences or None


def allowed(kept: torch.Tensor, score: torch.Tensor) -> int:
    """How many entries were chosen that a top-k of as many cannot choose, by more than rounding."""
    last = score[kept].min()
    return int((score[~kept] > last + ROUNDING * score[score.isfinite()].abs().max()).sum())


def compared(name: str, kept: torch.Tensor, found: Any, window: int, budget: int) -> int:
    """Entries that the release cannot keep, or cannot leave out, of `[L, H, T]`."""
    score, preferences = found
    if name == "defensivekv":
        return sum(allowed(*layer) for layer in zip(kept, score, strict=True))
    if name == "layer_defensivekv":
        largest = score.flatten(1).amax(1)[:, None, None]
        return allowed(kept, torch.where(score >= largest, score.max() * 2, score))
    layers, tokens = score.shape[0], score.shape[2]
    weight = np.array(preferences)
    share = weight / weight.sum() * (budget - window) * layers
    while (share > tokens - window).any():  # what a layer cannot hold goes to the others
        full = share >= tokens - window
        left = (budget - window) * layers - full.sum() * (tokens - window)
        share = np.where(full, tokens - window, weight / weight[~full].sum() * left)
    counts = kept.sum(-1)
    off = (counts - torch.from_numpy(share)[:, None] - window).abs() >= 1 + 1e-3 * budget
    heads = (zip(a, b, strict=True) for a, b in zip(kept, score, strict=True))
    return int(off.sum()) + sum(allowed(*head) for layer in heads for head in layer)


def main() -> int:
    """Compare all three policies; 1 if one keeps what its release cannot."""
    parser = argparse.ArgumentParser(description="Compare what kvbench and a release keep.")
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of FFY0/DefensiveKV")
    checkout = parser.parse_args().checkout
    missing = [f for f, _ in PRESSES.values() if not (checkout / f"kvpress/presses/{f}.py").exists()]
    if missing:
        parser.error(f"{checkout} has no kvpress/presses/{missing[0]}.py; clone FFY0/DefensiveKV")
    with tempfile.TemporaryDirectory() as folder:
        models = random_models(Path(folder))  # first: it copes with a torchvision of any build
        return report({name: press_of(checkout, name) for name in PRESSES}, models)


def report(presses: dict[str, Any], folders: dict[str, str]) -> int:
    """Print the comparison on all models, lengths and budgets."""
    from transformers import AutoModelForCausalLM

    import kvbench

    failed = 0
    draw = torch.Generator().manual_seed(0)
    for model_name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for length in LENGTHS:
            ids = torch.randperm(997, generator=draw)[None, :length] % model.config.vocab_size
            window = WINDOWS[length][0]
            for name, made in presses.items():
                tau = ":tau1=1.6:tau2=0.6" if name == "cake" else ":variant=release"
                line = []
                for budget in (max(2 * window, int(share * length)) for share in SHARES):
                    policy = f"{name}:window={window}{tau}"
                    kept = torch.stack([x[0] for x in kvbench.kept(model, ids, policy, budget)])
                    # A millionth of an entry more, so that `int` gives the budget.
                    press = made(1 - (budget + 1e-6) / length, window)
                    press.tau1, press.tau2, press.gamma = 1.6, 0.6, 200.0
                    found = release_scores(press, model, ids)
                    line.append(compared(name, kept, found, window, budget))
                failed += sum(line)
                print(f"{name:<20}{model_name:<11}{length:>4}  wrong entries: {line}", flush=True)
    print(f"{failed} entries that the release cannot keep or leave out")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
