"""Where does the reference model keep a needle? Found by removing entries from its cache.

    python benchmarks/reference_masking.py [--task niah_single_2] [--length 1024] [--samples 20]

After the context is prefilled, and before the question is seen, entries are removed: the needle's
own tokens, or the three tokens behind it, in all layers or in some. Then the model answers. The
second table says how scores rank the three tokens behind the needle in the last layer at that
moment: the median percentile among the tokens that the score does not protect (0 is evicted first).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.wrong_input import refused
from kvbench.engine.cache import RaggedCache
from kvbench.engine.decide import EvictionStep
from kvbench.engine.decode import Stop, greedy
from kvbench.engine.draw import row_seeds
from kvbench.engine.driver import engine
from kvbench.engine.loading import load_model
from kvbench.engine.models import model_info
from kvbench.engine.prefix import Prefix
from kvbench.plugin import Scores, protect_nothing
from kvbench.profiles.ablation import everything, keep_only
from kvbench.profiles.needles import Needle, find_needles
from kvbench.runs.grid import Grid
from kvbench.runs.planning import plan
from kvbench.spelling import policy

BEHIND = 3
"""Tokens behind the needle that are looked at."""
SCORES = (
    "snapkv:kernel=1",
    "h2o:recent=0",
    "tova",
    "obcache",
    "knorm",
    "keydiff",
    "rkv",
    "random",
)


def load(task: str, length: int, samples: int) -> tuple[nn.Module, Any, list[Needle]]:
    """The reference model, its tokenizer, and needle prompts."""
    given = {"tasks": task, "lengths": [length], "samples": samples, "device": "cpu"}
    grid = Grid.from_dict({**given, "models": "reference", "policies": "full"})
    (stage,) = plan(grid, print).stages
    (job,) = stage.jobs
    model = load_model("reference", None, torch.device("cpu"), torch.float32)
    return model, stage.tokenizer, find_needles(stage.tokenizer, job.prompts)


def answers(tokenizer: Any, prefix: Prefix, needle: Needle, keep: Sequence[Tensor]) -> bool:
    """Whether the model still answers a prompt when its cache holds only some entries."""
    prompt, request = needle.prompt, needle.prompt.request
    stop = Stop(tokenizer, (), [*request.until, request.target[0]])
    cut = prefix.fork()
    cut.cache = keep_only(prefix.cache, keep, len(prompt.question_ids) + request.max_new_tokens)
    logits = cut.extend(torch.tensor([prompt.question_ids]))
    tokens = list(greedy(cut, logits, request.max_new_tokens, stop))
    return request.target[0] in tokenizer.decode(tokens)


def removed(cache: RaggedCache, tokens: range, layers: Sequence[int]) -> list[Tensor]:
    """Which entries are kept if some tokens are removed from some layers."""
    keep = everything(cache)
    for layer in layers:
        keep[layer][..., tokens] = False
    return keep


def percentiles(prefix: Prefix, spec: str, tokens: range) -> list[float]:
    """Where a score ranks tokens in the last layer, in each KV head, from 0 to 100."""
    chosen = policy(spec)
    assert chosen.score is not None
    length = int(prefix.cache.lengths()[0])
    seeds = row_seeds(prefix.cache, 0)
    cut = EvictionStep(chosen, prefix.cache, prefix.info, "context", [length // 5], seeds)
    last = prefix.info.layers - 1
    view = cut.view(prefix.cache.ragged[last], last)
    found = chosen.score.score(view)
    scores = found if isinstance(found, Scores) else Scores(found, protect_nothing(view))
    ranks = []
    for value, protect in zip(scores.value[0], scores.protect[0], strict=True):
        free = value[protect == 0]
        ranks += [float((free < value[t]).float().mean()) * 100 for t in tokens if not protect[t]]
    return ranks


@torch.no_grad()
def study(task: str, length: int, samples: int) -> tuple[dict[str, int], dict[str, float]]:
    """Count correct answers by what was removed, and give median percentiles by score."""
    model, tokenizer, needles = load(task, length, samples)
    every = range(model_info(model).layers)
    last = every[-1]
    correct: dict[str, int] = {}
    ranks: dict[str, list[float]] = {}
    with engine(model):
        for needle in needles:
            prefix = Prefix(model, frozenset().union(*(policy(s).needs for s in SCORES)))
            prefix.extend(torch.tensor(needle.prompt.context_ids)[None])
            own = range(needle.start, needle.stop)
            behind = range(needle.stop, needle.stop + BEHIND)
            cases = {
                "nothing": (own, ()),
                "the needle, in all layers": (own, every),
                f"the {BEHIND} tokens behind it, in layers 0 to {last - 1}": (behind, every[:-1]),
                f"the {BEHIND} tokens behind it, in layer {last}": (behind, [last]),
            }
            for name, (tokens, layers) in cases.items():
                keep = removed(prefix.cache, tokens, list(layers))
                right = answers(tokenizer, prefix, needle, keep)
                correct[name] = correct.get(name, 0) + right
            for spec in SCORES:
                ranks.setdefault(spec, []).extend(percentiles(prefix, spec, behind))
    return correct, {spec: median(found) for spec, found in ranks.items()}


@refused()
def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", default="niah_single_2", help="a task with one needle")
    parser.add_argument("--length", type=int, default=1024, help="tokens of prompt and answer")
    parser.add_argument("--samples", type=int, default=20)
    options = parser.parse_args()
    correct, ranks = study(options.task, options.length, options.samples)
    print(f"| removed | answered correctly, of {options.samples} |\n| --- | --: |")
    print("\n".join(f"| {name} | {count} |" for name, count in correct.items()))
    print("\n| score | median percentile of the tokens behind the needle |\n| --- | --: |")
    print("\n".join(f"| `{spec}` | {rank:.1f} |" for spec, rank in ranks.items()))


if __name__ == "__main__":
    main()
