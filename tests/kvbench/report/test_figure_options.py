"""Figures as a paper needs them: formats, width, names, order, and what is refused."""

from __future__ import annotations

import colorsys
import itertools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvbench import cli
from kvbench.analysis.speed.figures import draw_bench
from kvbench.errors import UserError
from kvbench.report import render
from kvbench.report.figure_options import X_AXES, FigureOptions, parse_labels
from kvbench.report.frames import prepare
from kvbench.tables.plot_style import _COLOURS, SEQUENTIAL

POLICIES = ["random", "snapkv", "criticalkv"]


@pytest.fixture(scope="module")
def frames(run_frames: Any) -> Any:
    return run_frames(POLICIES, tasks=["vt", "cwe"])


def texts(folder: Path, name: str) -> str:
    return (folder / "figures" / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("width", [3.3, 7.0])
def test_every_figure_has_the_chosen_formats_and_width(frames: Any, tmp_path: Path, width: float) -> None:
    options = FigureOptions(formats=("pdf", "png"), width=width)
    paths = [path for path in render(*frames, tmp_path, figure_options=options) if path.parent.name == "figures"]
    assert {path.suffix for path in paths} == {".pdf", ".png"} and {path.stem for path in paths} > {"pareto-vt"}
    for path in paths:
        content = path.read_bytes()
        if path.suffix == ".png":
            assert struct.unpack(">I", content[16:20])[0] == round(200 * width)
        else:
            assert f"/MediaBox [ 0 0 {72 * width:g}".encode() in content and b"/Type3" not in content
    again = render(*frames, tmp_path / "again", figure_options=options)
    figures = [path for path in again if path.parent.name == "figures"]
    assert [path.read_bytes() for path in figures] == [path.read_bytes() for path in paths]


def test_policies_are_chosen_ordered_and_named_in_figures_only(frames: Any, tmp_path: Path) -> None:
    labels = {"snapkv": "SnapKV", "full": "Full"}
    options = FigureOptions(formats=("svg",), policies=("snapkv", "random"), labels=labels)
    render(*frames, tmp_path, figure_options=options)
    figure = texts(tmp_path, "pareto-vt")
    assert figure.index("SnapKV") < figure.index("random") and "criticalkv" not in figure and "Full" in figure
    assert "criticalkv" in (tmp_path / "summary.md").read_text(encoding="utf-8")


def test_titles_can_be_left_out_and_the_axis_chosen(frames: Any, tmp_path: Path) -> None:
    variants = {"plain": {}, "bare": {"has_title": False}} | {axis: {"x_axis": axis} for axis in X_AXES}
    for name, options in variants.items():
        render(*frames, tmp_path / name, figure_options=FigureOptions(formats=("svg",), **options))  # type: ignore[arg-type]
    found = {name: texts(tmp_path / name, "pareto-vt") for name in variants}
    assert "vt, " in found["plain"] and "vt, " not in found["bare"]
    assert "% of full" not in found["bytes"] and "KV cache held, KiB" in found["bytes"]
    assert "KV cache held, tokens per KV head" in found["tokens"] and "top: bytes" not in found["tokens"]
    assert "% of full" in found["budget"] and "top: bytes" not in found["budget"] and "top: bytes" in found["plain"]


def test_eight_policies_have_colours_that_differ_and_none_is_grey_or_yellow() -> None:
    rgb = [tuple(int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)) for colour in _COLOURS]
    assert len(rgb) >= 8
    for first, second in itertools.combinations(rgb, 2):
        assert sum((a - b) ** 2 for a, b in zip(first, second, strict=True)) ** 0.5 > 0.2
    for red, green, blue in rgb:
        hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
        assert saturation > 0.3 and not (0.12 < hue < 0.2 and lightness > 0.35)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"formats": ("gif",)}, "unknown format 'gif'; use pdf, png, svg"),
        ({"width": 2.0}, "width 2 is out of range; use 3 to 14 inches"),
        ({"x_axis": "time"}, "unknown x axis 'time'; use budget, bytes, tokens"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        FigureOptions(**options)


def test_policies_that_are_not_there_are_refused_before_anything_is_written(frames: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no policy 'h2o' in the results; they have"):
        render(*frames, tmp_path / "out", figure_options=FigureOptions(policies=("h2o",)))
    assert not (tmp_path / "out").exists()


def test_tokens_need_a_full_cache(run_frames: Any, tmp_path: Path) -> None:
    options = FigureOptions(x_axis="tokens")
    with pytest.raises(UserError, match="run without --no-full"):
        render(*run_frames(POLICIES, tasks=["vt"], with_full=False), tmp_path / "out", figure_options=options)
    assert not (tmp_path / "out").exists()


def test_labels_are_read_with_policies_that_contain_an_equals_sign(run_frames: Any) -> None:
    results = prepare(*run_frames(["snapkv", "snapkv:window=4"], tasks=["vt"]))
    assert parse_labels(["snapkv:window=4=Short", "snapkv=SnapKV"], results.policies) == {
        "snapkv:window=4": "Short",
        "snapkv": "SnapKV",
    }
    for wrong, says in (("snapkv", "is not a label"), ("snapkv=", "is not a label"), ("h2o=H2O", "no policy 'h2o'")):
        with pytest.raises(UserError, match=says):
            parse_labels([wrong], results.policies)


def test_no_colour_of_a_heat_map_is_pale_on_white_paper() -> None:
    red, green, blue, _ = np.array([SEQUENTIAL(share) for share in np.linspace(0, 1, 50)]).T
    channels = np.array([red, green, blue])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = np.array([0.2126, 0.7152, 0.0722]) @ linear
    assert (1.05 / (luminance + 0.05) >= 3).all()  # WCAG 2.2, criterion 1.4.11
    assert (np.diff(luminance) > 0).all()


@pytest.mark.parametrize("labels", [["snapkv=X", "keydiff=X"], ["snapkv=keydiff"], ["snapkv=full"]])
def test_two_policies_cannot_have_one_name(labels: list[str]) -> None:
    with pytest.raises(UserError, match=r"two policies would be called '(X|keydiff|full)'; give each a label"):
        parse_labels(labels, ["snapkv", "keydiff"])
    assert parse_labels(["snapkv=keydiff", "keydiff=snapkv"], ["snapkv", "keydiff"])


def test_a_benchmark_has_the_width_the_formats_and_the_labels_of_a_user(tmp_path: Path) -> None:
    rows = [
        {"model": "tiny", "policy": policy, "budget": budget, "moment": "context", "chunk": 0, "context": 512,
         "batch": 1, "batch_setting": "1", "generate": 8, "error": "",
         "ttft_s": 0.1, "step_s": 0.01, "tokens_per_s": 9.0, "kv_bytes_live": 2**20}
        for policy, budget in (("full", "full"), ("snapkv", "0.1"), ("snapkv", "0.2"))
    ]  # fmt: skip
    options = FigureOptions(formats=("svg", "pdf"), width=3.3, labels={"snapkv": "SnapKV"}, has_title=False)
    paths = draw_bench(pd.DataFrame(rows), tmp_path, options)
    assert [path.name for path in paths] == ["bench-share.svg", "bench-share.pdf"]
    text = paths[0].read_text()
    assert f'width="{3.3 * 72:g}pt"' in text and "SnapKV" in text and "tiny" not in text


def test_a_wrong_label_of_an_analysis_is_refused_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["bench", "--policy", "snapkv", "--label", "h2o=H2O"]) == 2
    assert "no policy 'h2o'" in capsys.readouterr().err
