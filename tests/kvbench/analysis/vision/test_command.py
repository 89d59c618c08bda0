"""`kvbench analyze vision` from the outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvbench import cli
from kvbench.analysis.vision import grids

LOCAL = "local:buffer=0"


def arguments(folder: str, out: Path, *more: str) -> list[str]:
    base = ["analyze", "vision", "--model", folder, "--device", "cpu", "--out", str(out)]
    return [*base, *more]


@pytest.fixture(scope="module")
def images(models: dict[str, str], task: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Two policies at two moments over two samples."""
    out = tmp_path_factory.mktemp("images") / "deep" / "out"
    done = CliRunner().invoke(
        cli.app.app,
        arguments(
            models["qwen2_vl"], out, "--task", task, "--policy", f"{LOCAL},knorm:allocate=global",
            "--budget", "12", "--moment", "context,decode", "--samples", "2", "--layers", "1",
        ),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return out, " ".join(done.output.split())


def test_it_writes_tables_figures_and_a_summary(images: tuple[Path, str]) -> None:
    out, said = images
    assert {p.stem for p in out.glob("*.parquet")} == {"answers", "steps", "usage", "tokens"}
    assert {p.stem for p in out.glob("*.csv")} == {"answers", "steps"}
    assert "moment decode: entries per KV head, mean over 2 prompts" in said
    drawn = [p.name for p in (out / "figures").glob("*.png")]
    assert {p.stem for p in (out / "figures").glob("*.svg")} == {Path(n).stem for n in drawn}
    assert sum(n.startswith("kept-local") for n in drawn) == 2 * 2
    assert sum(n.startswith("kept-knorm") for n in drawn) == 2 * 2
    assert sum(n.startswith(("usage-context", "usage-decode")) for n in drawn) == 2 * 2
    summary = (out / "summary.md").read_text()
    assert all(f"](figures/{name})" in summary for name in drawn)
    settings = json.loads((out / "settings.json").read_text())
    assert (settings["analysis"], settings["layers"], settings["steps"]) == ("vision", [1], 2)
    assert settings["moments"] == ["context", "decode"]


def test_the_tables_agree_with_each_other(images: tuple[Path, str]) -> None:
    out, _ = images
    read: dict[str, Any] = {p.stem: pd.read_parquet(p) for p in out.glob("*.parquet")}
    keys = ["policy", "moment", "sample_id", "question_id"]
    usage = read["usage"].groupby([*keys, "step"], observed=True)[["entries", "visual"]].mean()
    steps = read["steps"].set_index([*keys, "step"])[["entries", "visual"]]
    pd.testing.assert_frame_equal(usage.sort_index(), steps.sort_index(), check_index_type=False)
    tokens = read["tokens"]
    for row in read["answers"].itertuples():
        mine = tokens
        for key in keys:
            mine = mine[mine[key] == getattr(row, key)]
        assert mine["position"].nunique() == row.visual_tokens
        assert mine["image"].nunique() == row.images == {"a": 3, "b": 1}[row.sample_id]
        assert (row.question, row.target) == ("Which one?", "this")
        # Held at the first step, counted from both tables.
        first = steps.loc[(row.policy, row.moment, row.sample_id, row.question_id, 0), "visual"]
        assert (mine["evicted"] != 0).fillna(True).sum() == pytest.approx(4 * first)
    assert set(tokens["image"]) == {1, 2, 3}
    late = read["answers"]["moment"] == "context"
    assert (read["answers"].loc[late, "cuts"] == 1).all()
    assert (tokens.loc[tokens["moment"] == "context", "evicted"].dropna() == 0).all()
    assert read["usage"]["vision_start"].notna().all()
    csv = pd.read_csv(out / "steps.csv")
    assert csv["visual"].tolist() == pytest.approx(read["steps"]["visual"].tolist())


def test_an_evicted_cell_looks_faded_in_the_figure(images: tuple[Path, str]) -> None:
    """The window of `local` holds the end of the prompt: nothing of sample b's only image."""
    out, _ = images
    (path,) = (out / "figures").glob("kept-local*-context-images-b.png")
    pixels = matplotlib.image.imread(path)[..., :3]
    colourful = pixels.max(-1) - pixels.min(-1) > 0.3
    (other,) = (out / "figures").glob("kept-knorm*-context-images-b.png")
    held = matplotlib.image.imread(other)[..., :3]
    assert colourful.mean() < 0.001 < 0.02 < (held.max(-1) - held.min(-1) > 0.3).mean()


def test_a_family_without_boundary_tokens_has_empty_columns(models: dict[str, str], task: str, tmp_path: Path) -> None:
    run = arguments(models["llava"], tmp_path, "--task", task, "--policy", "knorm", "--steps", "1")
    assert CliRunner().invoke(cli.app.app, run).exit_code == 0
    usage = pd.read_parquet(tmp_path / "usage.parquet")
    assert usage["vision_start"].isna().all() and usage["visual"].gt(0).any()
    assert len(list((tmp_path / "figures").glob("kept-*.png"))) == 1


def test_a_family_whose_token_grid_is_unknown_has_counts_but_no_pictures(
    models: dict[str, str], task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grids, "MERGED", ())
    run = arguments(models["qwen2_vl"], tmp_path, "--task", task, "--policy", "knorm")
    done = CliRunner().invoke(cli.app.app, run)
    assert done.exit_code == 0, done.output
    assert "no pictures, because it is not known where" in " ".join(done.output.split())
    assert {p.stem for p in tmp_path.glob("*.parquet")} == {"answers", "steps", "usage"}
    assert {p.name.split("-")[0] for p in (tmp_path / "figures").iterdir()} == {"usage"}


def test_a_policy_that_fails_leaves_the_others_and_exit_code_1(
    models: dict[str, str], task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.py").write_text(
        '"""Fails."""\ndef bad(v):\n    """Fail."""\n    raise RuntimeError("no such luck")\n'
    )
    bad = f"{tmp_path}/bad.py:bad"
    more = ["--task", task, "--policy", f"{bad},knorm"]
    assert cli.call(arguments(models["qwen2_vl"], tmp_path / "x", *more)) == 1
    assert "no such luck" in capsys.readouterr().err
    assert set(pd.read_parquet(tmp_path / "x" / "answers.parquet")["policy"]) == {"knorm"}
    more = ["--task", task, "--policy", bad]
    assert cli.call(arguments(models["qwen2_vl"], tmp_path / "y", *more)) == 2
    assert "nothing to show" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--layers", "9"], "full-attention layers are 0 to 1"),
        (["--heads", "one"], "--heads one: use comma-separated whole numbers"),
        (["--steps", "0"], "--steps 0: use a whole number from 1"),
        (["--questions", "lst"], "did you mean last?"),
        (["--new-tokens", "0"], "--new-tokens 0"),
        (["--moment", "turns"], "this analysis compresses at context or question or decode"),
        (["--policy", "full"], "evicts nothing"),
        (["--policy", "fastv", "--moment", "decode", "--budget", "9"], "it prunes once"),
    ],
)
def test_what_the_user_can_mend_is_one_line_and_exit_code_2(
    more: list[str],
    says: str,
    models: dict[str, str],
    task: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = [] if "--policy" in more else ["--policy", "knorm"]
    run = arguments(models["qwen2_vl"], tmp_path, "--task", task, *base, *more)
    assert cli.call(run) == 2
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith("kvbench: ") and says in error


def test_a_task_without_images_is_refused(
    grouped: str, questions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = arguments(grouped, tmp_path, "--task", questions, "--policy", "knorm")
    assert cli.call([*run, "--no-chat-template"]) == 2
    assert "mine shows no images; use a task that does" in capsys.readouterr().err


def test_analyses_that_share_a_prefill_refuse_policies_that_prune_it(
    models: dict[str, str], task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--model", models["qwen2_vl"], "--task", task, "--policy", "fastv", "--device", "cpu"]
    assert cli.call(["analyze", "allocation", *run, "--out", str(tmp_path)]) == 2
    assert "use kvbench analyze vision" in capsys.readouterr().err


def test_retention_lets_everything_up_to_the_last_image_pass_at_once(
    models: dict[str, str], task: str, tmp_path: Path
) -> None:
    run = ["--model", models["qwen2_vl"], "--task", task, "--policy", LOCAL, "--device", "cpu"]
    run += ["--samples", "1", "--budget", "12", "--new-tokens", "2", "--horizon", "4"]
    done = CliRunner().invoke(cli.app.app, ["analyze", "retention", *run, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    text = pd.read_parquet(tmp_path / "positions.parquet")
    last = text.loc[text["token"].str.contains("image_pad"), "position"].max()
    gone = pd.read_parquet(tmp_path / "evictions.parquet")["evicted"]
    assert gone.min() == last
