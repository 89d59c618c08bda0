"""Queries of sampled answers, before RoPE, of one query head."""

from __future__ import annotations

import numpy as np
import torch

from kvbench.decoding import Sampling
from kvbench.engine.draw import Draw, choose
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.plugin import Queries
from kvbench.runs.answers import Prompt
from kvbench.runs.worker import ModelRunner
from kvbench.stats import Floats
from kvbench.view.rope import angles, turn_back

_LAST = Queries(1)
_TOGETHER = 32
"""Answers sampled together."""


def sample_queries(
    runner: ModelRunner,
    prompt: Prompt,
    layer_index: int,
    head: int,
    *,
    count: int,
    new_tokens: int,
    temperature: float,
    end_token_ids: frozenset[int],
    seed: int,
) -> list[Floats]:
    """Sample answers with the full cache and record a head's query of every generated token.

    Args:
        layer_index: Index among the full-attention layers.
        head: Query head.
        count: Number of answers.
        new_tokens: Most tokens per answer; an end token ends it earlier.

    Returns:
        float64 `[tokens, d]` per answer. Queries are rotated back to position 0, so that the rotation by position is
        not taken for dynamics.

    Raises:
        UserError: The logits are not finite.
    """
    request = prompt.request
    answers: list[Floats] = []
    for first in range(0, count, _TOGETHER):
        rows = range(first, min(first + _TOGETHER, count))
        draws = [
            Draw(Sampling(temperature), (seed, request.task, request.sample_id, request.question_id, row))
            for row in rows
        ]
        prefix = Prefix(runner.model, {_LAST})
        logits = prefix.extend(runner.tensor(prompt.ids).expand(len(rows), -1))
        lengths = [new_tokens] * len(rows)
        queries = []
        for step in range(new_tokens):
            next_tokens = choose(logits, draws, [step] * len(rows))
            if min(next_tokens) < 0:
                raise UserError("logits are not finite, so no answer can be sampled; use --dtype float32")
            for row, token in enumerate(next_tokens):
                if token in end_token_ids:
                    lengths[row] = min(lengths[row], step)  # the end token itself is not part of the answer
            if all(length <= step for length in lengths):
                break
            logits = prefix.extend(torch.tensor(next_tokens, device=prefix.device)[:, None])
            query = prefix.cache.observers[_LAST].read(layer_index)[:, head, -1].float()
            position = torch.tensor([len(prompt.ids) + step], device=query.device)
            queries.append(turn_back(query, *angles(prefix.info, layer_index, position)).double().cpu().numpy())
        stacked = np.stack(queries, 1) if queries else np.zeros((len(rows), 0, 0))
        answers += [stacked[row, : lengths[row]] for row in range(len(rows))]
    return answers
