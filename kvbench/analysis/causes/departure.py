"""Moment `decode`: the cache at the step where a policy's answer departs from the full cache's.

The full cache's answer is fed token by token through the cache that evicts. At the first judged token that it does not
predict, the entries that were held before that step are a mask over the full cache of the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.analysis.causes.probe import ProbeResult
from kvbench.analysis.common import kept_masks
from kvbench.engine.cache import RaggedCache
from kvbench.engine.driver import forward
from kvbench.engine.prefix import Prefix
from kvbench.errors import PluginError
from kvbench.runs.answers import Prompt
from kvbench.runs.cell import Cell
from kvbench.runs.worker import ModelRunner


def compress_while_decoding(
    runner: ModelRunner,
    prefix: Prefix,
    cell: Cell,
    prompt: Prompt,
    answer_ids: Sequence[int],
    judged: Sequence[int],
) -> tuple[RaggedCache, Tensor, ProbeResult, int] | None:
    """Feed an answer through a cache that is evicted from meanwhile, until it departs.

    Args:
        runner: Runs the model.
        prefix: The full cache of the whole prompt.
        cell: The cell.
        prompt: The prompt.
        answer_ids: The full cache's answer.
        judged: Indices of its tokens that decide whether the answer is right.

    Returns:
        The full cache of prompt and answer up to that step, the entries held, bool `[L, H, columns]`, the outcome at
        the departure, and the step: the index of the token that is fed next. If it never departs, the last step before
        a judged token. None if the policy fails.
    """
    cache = runner.compress(prefix, cell, prompt)
    prefix.restore()
    if cache is None:
        return None
    held, outcome, step = torch.stack(kept_masks(cache)), ProbeResult(True, True, 0.0, float("inf")), 0
    for step in range(max(judged, default=0)):
        held = torch.stack(kept_masks(cache))
        try:
            with runner.policy_call():  # it evicts in the forward
                (logits,) = forward(runner.model, cache, runner.tensor([answer_ids[step]])).float()
        except PluginError as error:
            runner.fail(cell, prompt, str(error))
            return None
        token = answer_ids[step + 1]
        margin = float(logits[token] - torch.cat([logits[:token], logits[token + 1 :]]).max())
        nll = -float(logits.log_softmax(-1)[token])
        outcome = ProbeResult(margin > 0, margin > 0, nll, margin)
        if step + 1 in judged and not outcome.right:
            break
    dense = prefix.fork()
    if step:
        dense.extend(runner.tensor(answer_ids[:step]))
    return dense.cache, held.cpu(), outcome, step
