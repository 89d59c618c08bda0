"""The autoregression against simulated processes, and the queries against the model's own projections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from transformers import AutoModelForCausalLM

from kvbench.analysis.common import analysis_runner, prompts_grid, stages
from kvbench.analysis.queries.autoregression import Autoregression, fit_autoregression, principal_directions
from kvbench.analysis.queries.options import QueryOptions
from kvbench.analysis.queries.rollouts import sample_queries
from kvbench.analysis.queries.write import write_queries
from kvbench.decoding import Sampling
from kvbench.engine.draw import Draw, choose
from kvbench.errors import UserError
from kvbench.progress import Silent

MATRIX = np.array([[0.6, 0.3, 0.0], [-0.2, 0.5, 0.1], [0.0, 0.0, -0.4]])
OFFSET = np.array([1.0, -0.5, 0.2])
NOISE = np.array([[0.5, 0.1, 0.0], [0.1, 0.4, 0.05], [0.0, 0.05, 0.3]])


def simulate(steps: int, count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    factor = np.linalg.cholesky(NOISE)
    paths = []
    for _ in range(count):
        path = [rng.normal(size=3)]
        for _ in range(steps - 1):
            path.append(MATRIX @ path[-1] + OFFSET + factor @ rng.normal(size=3))
        paths.append(np.array(path))
    return paths


def test_a_simulated_process_is_found_again() -> None:
    paths = simulate(400, 30)
    fit = fit_autoregression(paths)
    np.testing.assert_allclose(fit.matrix, MATRIX, atol=0.03)
    np.testing.assert_allclose(fit.offset, OFFSET, atol=0.05)
    np.testing.assert_allclose(fit.noise, NOISE, atol=0.03)
    assert fit.radius == pytest.approx(max(abs(np.linalg.eigvals(MATRIX))), abs=0.03)
    mean, covariance = fit.stationary()
    late = np.concatenate([path[100:] for path in paths])
    np.testing.assert_allclose(mean, late.mean(0), atol=0.05)
    np.testing.assert_allclose(covariance, np.cov(late.T), atol=0.06)
    np.testing.assert_allclose(covariance, solve_discrete_lyapunov(fit.matrix, fit.noise), rtol=1e-9)
    whitened = fit.whitened(simulate(400, 10, seed=1))
    np.testing.assert_allclose(np.cov(whitened.T), np.eye(3), atol=0.1)
    assert 0.2 < fit.explained(simulate(400, 10, seed=1)) < 1


def test_steps_do_not_cross_from_one_answer_to_the_next() -> None:
    """Normal equations over pairs within answers, one by one; an answer of one token has no step."""
    paths = [*simulate(7, 6), np.ones((1, 3)), np.zeros((0, 3))]
    pairs = [(path[t], path[t + 1]) for path in paths for t in range(len(path) - 1)]
    design = np.array([[*before, 1.0] for before, _ in pairs])
    solution = np.linalg.inv(design.T @ design) @ design.T @ np.array([after for _, after in pairs])
    fit = fit_autoregression(paths)
    np.testing.assert_allclose(fit.matrix, solution[:3].T, atol=1e-9)
    np.testing.assert_allclose(fit.offset, solution[3], atol=1e-9)
    with pytest.raises(UserError, match="2 steps are too few"):
        fit_autoregression([paths[0][:3]])


def test_a_process_that_is_not_stable_has_no_stationary_moments() -> None:
    mean, covariance = Autoregression(np.eye(2) * 1.01, np.zeros(2), np.eye(2)).stationary()
    assert np.isnan(mean).all() and np.isnan(covariance).all()


def test_directions_hold_the_most_variance() -> None:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(200, 5)) * [5.0, 3.0, 1.0, 0.1, 0.1] + 7
    directions, share = principal_directions(states, 2)
    np.testing.assert_allclose(directions.T @ directions, np.eye(2), atol=1e-9)
    values = np.sort(np.linalg.eigvalsh(np.cov(states.T)))[::-1]
    assert share == pytest.approx(values[:2].sum() / values.sum())


def test_queries_are_the_projections_of_the_tokens_that_were_sampled(grouped: str, questions: str) -> None:
    """Sample with the model alone: its own forward, the noise of `choose`, and its own `q_proj` before RoPE."""
    grid = prompts_grid({"models": grouped, "tasks": questions, "samples": 1, "chat_template": False, "device": "cpu"})
    (stage,) = stages(grid, print)
    prompt = stage.jobs[0].prompts[0]
    with analysis_runner(stage, grid, Silent(), {}) as runner:
        found = sample_queries(
            runner, prompt, 1, 3, count=2, new_tokens=6, temperature=0.8, end_token_ids=frozenset(), seed=0
        )
    model = AutoModelForCausalLM.from_pretrained(grouped).eval()
    projected: list[torch.Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: projected.append(args[2]))
    request = prompt.request
    for row in range(2):
        ids = list(prompt.ids)
        draw = Draw(Sampling(0.8), (0, request.task, request.sample_id, request.question_id, row))
        for step in range(6):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[:, -1]
            ids += choose(logits, [draw], [step])
        projected.clear()
        with torch.no_grad():
            model(torch.tensor([ids]))
        expected = projected[0][0, len(prompt.ids) :, 3 * 16 : 4 * 16]
        np.testing.assert_allclose(found[row], expected.numpy(), atol=1e-4)


def test_the_analysis_writes_fits_and_a_figure(grouped: str, questions: str, tmp_path: Path) -> None:
    options = QueryOptions(layer=1, head=2, rollouts=8, new_tokens=12, components=3)
    grid = {"models": grouped, "tasks": questions, "samples": 2, "chat_template": False, "out": str(tmp_path)}
    done = write_queries(grid, Silent(), options=options)
    prompts, eigenvalues, innovations = (
        pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("prompts", "eigenvalues", "innovations")
    )
    assert len(eigenvalues) == 3 * len(prompts)
    radius = np.hypot(eigenvalues["real"], eigenvalues["imaginary"]).groupby(eigenvalues["sample_id"]).max()
    np.testing.assert_allclose(prompts.set_index("sample_id")["radius"], radius.loc[prompts["sample_id"]])
    assert len(innovations) <= 2 * 11 * len(prompts), "two of eight answers are held out"
    assert [path.name for path in done.files if path.suffix == ".png"]
    with pytest.raises(UserError, match="no query head 9"):
        write_queries({**grid, "out": str(tmp_path / "no")}, Silent(), options=QueryOptions(head=9))
