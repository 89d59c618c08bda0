"""Q-filters and query statistics: measured, written by the command, found by the policy."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import kvbench
from kvbench import cli, reference
from kvbench.engine.loading import load_model
from kvbench.engine.observers import QueryObserver
from kvbench.engine.prefix import Prefix
from kvbench.errors import UserError
from kvbench.named import model_digest
from kvbench.plugin import Queries
from kvbench.profiles import queries
from kvbench.profiles.command import profile_queries
from kvbench.profiles.queries import filters_of, query_moments, sample_queries
from kvbench.profiles.summaries import (
    FILTERS,
    KIND,
    STATISTICS,
    WEIGHTS,
    QuerySummary,
    SummaryNotes,
)
from kvbench.progress import Silent

SHAPE = (4, 2, 32)
SHAPES = {"q_filters": SHAPE}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The reference model under another name, so that nothing ships for it."""
    path = tmp_path_factory.mktemp("models") / "mine"
    shutil.copytree(reference.path(), path)
    return str(path)


def test_a_filter_points_away_from_most_queries() -> None:
    rng = np.random.default_rng(0)
    main = rng.normal(size=(6, 8))
    main /= np.linalg.norm(main, axis=1, keepdims=True)
    rows = rng.normal(size=(6, 300, 8)) * 0.1
    along = rng.exponential(size=(6, 300, 1)) * np.where(rng.random((6, 300, 1)) < 0.8, 1, -3)
    rows += along * main[:, None]  # few, but far on the other side
    found = filters_of(torch.from_numpy(rows).float(), 2)
    expected = []
    for h in range(2):
        total = np.zeros(8)
        for g in range(3 * h, 3 * h + 3):
            _, vectors = np.linalg.eigh(rows[g].T @ rows[g])
            direction = vectors[:, -1]
            agree = sum(float(row @ direction) > 0 for row in rows[g])
            total += -direction if agree > 150 else direction
        expected.append(total / 3)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    for h in range(2):
        np.testing.assert_allclose(found[h], -main[3 * h : 3 * h + 3].mean(0), atol=0.05)


def test_queries_are_drawn_from_all_tokens_the_same_in_all_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queries, "QUERIES", 20)
    model = load_model("reference", None, torch.device("cpu"), torch.float32)
    prompts = [list(range(200, 240)), list(range(300, 307))]
    found = sample_queries(model, prompts, 0, Silent())
    again = sample_queries(model, prompts, 0, Silent())
    other = sample_queries(model, prompts, 1, Silent())
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True))
    assert not torch.equal(found[0], other[0])
    prefix = Prefix(model, {Queries(40)})
    with queries.engine(model):
        prefix.extend(torch.tensor(prompts[:1]))
    for i, layer in enumerate(found):
        assert layer.shape == (4, 10 + 7, 32)
        observer = prefix.cache.observers[Queries(40)]
        assert isinstance(observer, QueryObserver)
        whole = observer.read(i)[0]
        same = (layer[:, :10, None] == whole[:, None]).all(-1)
        columns = same.int().argmax(-1)
        assert bool(same.any(-1).all())
        assert bool((columns == columns[0]).all())
        assert len(set(columns[0].tolist())) == 10


def test_filters_are_written_where_the_policy_looks(folder: str, cache: Path) -> None:
    command = ["profile", "qfilters", "--model", folder, "--length", "200", "--samples", "3"]
    done = CliRunner().invoke(cli.app.app, [*command, "--seed", "5"])
    assert done.exit_code == 0, done.output
    path = FILTERS.artifacts.user_path(folder, KIND)
    assert path.parent == cache / "profiles"
    assert f"wrote {path}" in done.stdout
    assert "4 layers by 2 KV heads of 32 channels" in " ".join(done.stdout.split())
    tensors, notes = FILTERS.read(path)
    filters = tensors["q_filters"]
    assert filters.shape == SHAPE
    count = notes.queries
    assert 100 < count <= 600
    expected = SummaryNotes(folder, model_digest(folder), "facts", (200,), 3, count, 5, kvbench.__version__)
    assert notes == expected
    assert float(filters.norm(dim=-1).max()) <= 1.0001
    assert torch.equal(FILTERS.load(folder, None, SHAPES)["q_filters"], filters)
    chosen = kvbench.policy("qfilters")
    before = chosen.fingerprint(folder)
    FILTERS.save(path, {"q_filters": -filters}, notes)
    assert chosen.fingerprint(folder) != before


def test_filters_ship_for_the_reference_model(folder: str) -> None:
    shipped = FILTERS.load("reference", None, SHAPES)["q_filters"]
    assert bool((shipped.norm(dim=-1) > 0.3).all())
    assert FILTERS.find("reference", None).parent == FILTERS.artifacts.shipped
    with pytest.raises(UserError, match=r"has no Q-filters; run `kvbench profile qfilters"):
        FILTERS.find(folder, None)


def test_out_names_a_folder_and_says_how_to_read_it(folder: str, tmp_path: Path) -> None:
    command = ["profile", "qfilters", "--model", folder, "--length", "200", "--samples", "1"]
    done = CliRunner().invoke(cli.app.app, [*command, "--out", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    said = "".join(done.stdout.split())
    assert f"readthemwithfilters={tmp_path / 'mine'}" in said
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out \S+ is a file; give the path of a folder"):
        profile_queries(FILTERS, folder, {}, tmp_path / "file", Silent())


def test_what_the_authors_publish_can_be_read(tmp_path: Path) -> None:
    given = torch.randn(SHAPE)
    save_file({"q_filters": given}, tmp_path / WEIGHTS)
    found, notes = FILTERS.read(tmp_path)
    assert torch.equal(found["q_filters"], given)
    assert notes == SummaryNotes()
    assert torch.equal(FILTERS.load("any", str(tmp_path), SHAPES)["q_filters"], given)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": torch.ones(2)}, "no tensor q_filters"),
        ({"q_filters": torch.ones(2, 3)}, "no tensor q_filters of 3 axes"),
        ({"q_filters": torch.full((1, 1, 1), torch.nan)}, "not finite"),
    ],
)
def test_what_holds_no_filters_is_refused(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(UserError, match=message):
        FILTERS.read(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(UserError, match="is damaged"):
        FILTERS.read(tmp_path)


def test_moments_are_those_of_queries_before_rope() -> None:
    model = load_model("reference", None, torch.device("cpu"), torch.float32)
    prompts = [list(range(200, 240)), list(range(300, 309))]
    mean, covariance, count = query_moments(model, prompts, Silent())
    assert count == 36 + 5
    layer = model.model.layers[0]
    rows = []
    for ids in prompts:
        hidden = layer.input_layernorm(model.model.embed_tokens(torch.tensor([ids])))
        with torch.no_grad():
            query = layer.self_attn.q_proj(hidden)[0, 4:].unflatten(1, (4, 32))
            rows.append(layer.self_attn.q_norm(query))
    found = torch.cat(rows).double().numpy()
    np.testing.assert_allclose(mean[0], found.mean(0), atol=1e-4)
    for head in range(4):
        expected = np.cov(found[:, head], rowvar=False)
        np.testing.assert_allclose(covariance[0, head], expected, atol=1e-3)
    assert mean.shape == (4, 4, 32)
    assert covariance.shape == (4, 4, 32, 32)
    with pytest.raises(UserError, match="need two queries"):
        query_moments(model, [[1, 2, 3, 4, 5]], Silent())


def test_statistics_are_written_where_the_policy_looks(folder: str) -> None:
    command = ["profile", "queries", "--model", folder, "--length", "200", "--samples", "1"]
    chosen = kvbench.policy("expected_attention", statistics="profile")
    with pytest.raises(UserError, match="has no query statistics; run `kvbench profile queries"):
        chosen.fingerprint(folder)
    done = CliRunner().invoke(cli.app.app, command)
    assert done.exit_code == 0, done.output
    path = STATISTICS.artifacts.user_path(folder, KIND)
    assert f"wrote {path}" in done.stdout
    assert "4 layers by 4 query heads of 32 channels" in " ".join(done.stdout.split())
    assert chosen.fingerprint(folder)
    assert not kvbench.policy("expected_attention").fingerprint(folder)
    shapes = {"query_mean": (4, 4, 32), "query_cov": (4, 4, 32, 32)}
    found = STATISTICS.load("reference", None, shapes)
    assert bool((torch.linalg.eigvalsh(found["query_cov"]) > -1e-2).all())


@pytest.mark.parametrize("sort", [FILTERS, STATISTICS])
def test_a_summary_of_another_model_is_refused(sort: QuerySummary, tmp_path: Path) -> None:
    tensors = {name: torch.ones([2] * axes) for name, axes in sort.axes.items()}
    sort.save(tmp_path, tensors, SummaryNotes())
    name, axes = next(iter(sort.axes.items()))
    with pytest.raises(UserError, match="is for 2 layers by 2 heads of 2 channels, but model m"):
        sort.load("m", str(tmp_path), {name: (3,) * axes})
