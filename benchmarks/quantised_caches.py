"""kvbench's quantised caches beside those of transformers: `python -m benchmarks.quantised_caches`.

`QuantizedCache` of transformers quantises through hqq or optimum-quanto. Both sides get the same
weights and the same prompts. Each prefills a context into its cache and is then fed question and
answer, the answer that the full cache gives greedily. Printed are the bytes that the cache takes
behind the context, as a share of the full cache's; the mean divergence `KL(full || cache)` over the
answer's tokens in nats; and in how many answers the cache's most likely token is the full cache's
throughout, so that the greedy answer is the same.

kvbench itself needs `pip install 'kvbench[quantizers]'`, for `quantizer=`. The other side has an
environment of its own, which needs no kvbench:

    python3 -m venv .venv-hqq
    .venv-hqq/bin/pip install torch==2.13.0 transformers==5.23.0 hqq optimum-quanto
    python -m benchmarks.quantised_caches --hqq-python .venv-hqq/bin/python

optimum-quanto compiles an extension when it is first used: a C++ compiler and ninja must be there.
What differs by design: transformers quantises the whole context at once, its newest tokens as well,
and everything again whenever `residual_length` more tokens have come (not here). By default its
groups are channels of one entry, for keys as for values (axis 1 of hqq, 0 of quanto). Keys along
axis -1 of quanto are quantised per channel in groups of neighbouring entries, as here, so that with
`residual=0` both should hold the same numbers; axis 0 of hqq takes a channel's numbers from entries
that are far apart.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.two_sides import Other, both_sides, cases_of

OTHER = Other("hqq", "hqq, optimum.quanto", "torch==2.13.0 transformers==5.23.0 hqq optimum-quanto")
MODELS = {"reference": 512, "smollm2": 512}
"""Models, and tokens of their prompts."""
TASKS = ("niah_single_2", "niah_multikey_1", "vt")
SAMPLES = 3
ANSWER = 16
"""Tokens of an answer."""
OURS = [
    f"full:bits={bits}{residual}{how}"
    for how in ("", ":quantizer=hqq", ":quantizer=quanto")
    for residual in ("", ":residual=0")
    for bits in (4, 2)
]
AXES = {"hqq": ((1, 1), (0, 1)), "quanto": ((0, 0), (-1, 0))}
"""Axes of keys and values: groups of channels for both; groups of entries for keys."""
GROUP = 32
"""Numbers of a group, on both sides."""
NEVER = 1 << 20
"""Tokens behind the context before transformers quantises a second time: more than are fed."""


@torch.no_grad()
def prepared(folder: Path) -> list[dict[str, Any]]:
    """Save the models, and have the full cache answer the prompts."""
    from benchmarks.wrong_input import refused
    from kvbench.analysis.common import analysis_model, contexts, stages
    from kvbench.runs.grid import Grid

    made = []
    for name, length in MODELS.items():
        grid = Grid(policies=("full",), models=(name,), tasks=TASKS, lengths=(length,), samples=SAMPLES)
        with refused():
            (stage,) = stages(grid, print)
        with analysis_model(stage, grid, print) as model:
            model.save_pretrained(folder / name)
            for prompt in (p for job in stage.jobs for p, *_ in contexts(job)):
                ids = torch.tensor([[*prompt.context_ids, *prompt.question_ids]])
                out = model.generate(ids, max_new_tokens=ANSWER, do_sample=False)
                tokens = out[0].tolist()
                size = len(prompt.context_ids) // GROUP * GROUP  # hqq packs no other lengths
                case = {"context": tokens[:size], "asked": tokens[size:]}
                made.append({"model": name, **case, "first": ids.shape[1] - size})
    return made


def distance(logits: Tensor, full: Tensor) -> tuple[float, bool]:
    """The mean divergence of a cache from the full one, and whether its greedy answer is the same.

    Args:
        logits: Behind every token before one of the answer, `[n, vocabulary]`.
        full: The same with the full cache.
    """
    right, found = full.double().log_softmax(-1), logits.double().log_softmax(-1)
    divergence = float((right.exp() * (right - found)).sum(-1).mean())
    return divergence, bool((logits.argmax(-1) == full.argmax(-1)).all())


def each(folder: Path) -> Iterator[tuple[dict[str, Any], Any]]:
    """Every prompt, with its model."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for case in cases_of(folder):
        if case["model"] not in models:
            path = folder / case["model"]
            models[case["model"]] = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        yield case, models[case["model"]].eval()


def prefill(model: Any, cache: Any, case: dict[str, Any]) -> None:
    """Feed a cache the context."""
    model(torch.tensor([case["context"]]), past_key_values=cache, use_cache=True)


def answer(model: Any, cache: Any, case: dict[str, Any]) -> Tensor:
    """Feed a cache question and answer; the logits of the answer, `[n, vocabulary]`."""
    ids = torch.tensor([case["asked"][:-1]])
    logits: Tensor = model(ids, past_key_values=cache, use_cache=True).logits
    return logits[0, case["first"] - 1 :]


def taken(held: Any) -> int:
    """Bytes of all plain tensors in what transformers stores."""
    if isinstance(held, dict):
        return sum(map(taken, held.values()))
    if isinstance(held, tuple | list):
        return sum(map(taken, held))
    if isinstance(held, Tensor) and type(held) is not Tensor:
        names = [n for n in ("_data", "_scale", "_shift") if hasattr(held, n)]
        return sum(taken(getattr(held, n)) for n in names)
    return held.numel() * held.element_size() if isinstance(held, Tensor) else 0


@torch.no_grad()
def other_side(folder: Path) -> None:
    """Measure transformers' quantised caches; write rows to `theirs.json`."""
    from importlib.metadata import version

    from transformers import DynamicCache, QuantizedCache

    rows: list[Any] = []
    for case, model in each(folder):
        plain = DynamicCache(config=model.config)
        prefill(model, plain, case)
        full = answer(model, plain, case)
        size = sum(2 * len(case["context"]) * layer.keys[0, :, 0].numel() * 4 for layer in plain.layers)
        settings = [(b, n, *axes) for b, pairs in AXES.items() for axes in pairs for n in (4, 2)]
        for backend, bits, of_key, of_value in settings:
            cache = QuantizedCache(
                backend,
                model.config,
                nbits=bits,
                axis_key=of_key,
                axis_value=of_value,
                q_group_size=GROUP,
                residual_length=NEVER,
            )
            prefill(model, cache, case)
            held = [(x._quantized_keys, x._quantized_values) for x in cache.layers]
            share = taken(held) / size
            logits = answer(model, cache, case)
            name = f"{backend}: {bits} bits, axes {of_key} and {of_value}"
            rows.append((case["model"], name, share, *distance(logits, full)))
    packages = ("hqq", "optimum-quanto", "transformers", "torch")
    versions = ", ".join(f"{p} {version(p)}" for p in packages)
    (folder / "theirs.json").write_text(json.dumps({"versions": versions, "rows": rows}))


@torch.no_grad()
def compare(folder: Path) -> int:
    """Measure kvbench's caches, and print all."""
    from importlib.metadata import version

    import kvbench

    theirs = json.loads((folder / "theirs.json").read_text())
    rows: list[Any] = []
    for case, model in each(folder):
        with kvbench.attach(model, "full", "full") as cache:
            prefill(model, cache, case)
            full = answer(model, cache, case)
        for spec in OURS:
            with kvbench.attach(model, spec, "full") as cache:
                prefill(model, cache, case)
                share = cache.live_bytes() / cache.full_bytes(0)
                logits = answer(model, cache, case)
            rows.append((case["model"], spec, share, *distance(logits, full)))
    print(f"kvbench {version('kvbench')}  against  {theirs['versions']}\n")
    print("| model | cache | bytes | KL, nats | same answer |\n| --- | --- | --- | --- | --- |")
    for name in MODELS:
        found = [row for row in [*rows, *theirs["rows"]] if row[0] == name]
        for cache_name in dict.fromkeys(row[1] for row in found):
            own = np.array([row[2:] for row in found if row[1] == cache_name], dtype=float)
            share, divergence, same = own.mean(0)
            print(
                f"| {name} | {cache_name} | {share:.1%} | {divergence:.4f} | "
                f"{int(same * len(own) + 0.5)} of {len(own)} |"
            )
    return 0


if __name__ == "__main__":
    name = "benchmarks.quantised_caches"
    about = "Compare kvbench's quantised caches with those of transformers."
    sys.exit(both_sides(name, about, OTHER, prepared, other_side, compare))
