"""Simulated clustered 0/1 scores whose true mean is known, and how often intervals cover it.

`python -m tests.kvbench.coverage` prints the tables of docs/statistics.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvbench.stats import Floats, paired, summary

QUESTIONS = 4
CONTEXTS = (10, 15, 20, 30, 50, 100, 200)
LEVELS = ((0.5, 0.1), (0.5, 0.5), (0.8, 0.1), (0.8, 0.5), (0.95, 0.5))
"""Mean score, and the correlation of the scores of one context."""
SINGLE = ((0.5,), (0.8,), (0.95,))
CHANGES = ((0.1, 0.1), (0.15, 0.05), (0.3, 0.1), (0.2, 0.2), (0.02, 0.02))
"""Share of the answers that are lost, and that are gained; together at most 0.5."""


def scores(rng: np.random.Generator, level: float, icc: float, contexts: int, questions: int = QUESTIONS) -> Floats:
    """0/1 scores `[contexts, questions]` with that mean and correlation within a context."""
    strength = (1 - icc) / icc
    p = rng.beta(level * strength, (1 - level) * strength, contexts)
    return (rng.random((contexts, questions)) < p[:, None]) * 1.0


def changes(rng: np.random.Generator, lost: float, gained: float, contexts: int) -> tuple[Floats, Floats]:
    """0/1 scores of two runs `[contexts, QUESTIONS]`; some contexts change more than others."""
    scale = 2 * rng.beta(0.5, 0.5, contexts)[:, None]
    draw = rng.random((contexts, QUESTIONS))
    fixed = rng.random((contexts, QUESTIONS)).round()
    is_lost, is_gained = draw < lost * scale, draw > 1 - gained * scale
    before = np.where(is_lost, 1.0, np.where(is_gained, 0.0, fixed))
    return before, np.where(is_lost, 0.0, np.where(is_gained, 1.0, fixed))


def names(contexts: int, questions: int = QUESTIONS) -> list[str]:
    """The context of every question."""
    return [f"{i:03d}" for i in range(contexts) for _ in range(questions)]


def mean_coverage(level: float, icc: float, contexts: int, runs: int, questions: int = QUESTIONS) -> float:
    """Share of the runs whose interval of the mean covers the true one."""
    rng = np.random.default_rng([contexts, int(100 * level), int(100 * icc)])
    clusters, covered = names(contexts, questions), 0
    for _ in range(runs):
        found = summary(scores(rng, level, icc, contexts, questions).ravel(), clusters)
        covered += found.lo <= level <= found.hi
    return covered / runs


def single_coverage(level: float, contexts: int, runs: int) -> float:
    """`mean_coverage` with one question per context."""
    return mean_coverage(level, 0.5, contexts, runs, questions=1)


def difference_coverage(lost: float, gained: float, contexts: int, runs: int) -> float:
    """Share of the pairs of runs whose interval of the difference covers the true one."""
    rng = np.random.default_rng([contexts, int(100 * lost), int(100 * gained)])
    keys = range(contexts * QUESTIONS)
    clusters, covered = dict(zip(keys, names(contexts), strict=True)), 0
    for _ in range(runs):
        before, after = (dict(zip(keys, x.ravel().tolist(), strict=True)) for x in changes(rng, lost, gained, contexts))
        found = paired(after, before, clusters)
        covered += found.lo <= gained - lost <= found.hi
    return covered / runs


def tables(runs: int) -> Iterator[str]:
    """The tables in Markdown, in percent."""
    head = " | ".join(map(str, CONTEXTS))
    for title, cases, of in (
        ("mean, correlation", LEVELS, mean_coverage),
        ("lost, gained", CHANGES, difference_coverage),
        ("mean, one question", SINGLE, single_coverage),
    ):
        yield f"| {title} | {head} |"
        yield f"| --- |{' --: |' * len(CONTEXTS)}"
        for case in cases:
            cells = (f"{100 * of(*case, contexts, runs):.1f}" for contexts in CONTEXTS)
            yield f"| {', '.join(map(str, case))} | {' | '.join(cells)} |"
        yield ""


if __name__ == "__main__":
    for line in tables(2000):
        print(line, flush=True)
