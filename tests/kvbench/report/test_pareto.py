"""The Pareto front against a quadratic oracle, and what the figures show."""

from __future__ import annotations

import itertools
import warnings

import matplotlib.text
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import UserError
from kvbench.report import heatmap, pareto_figures
from kvbench.report.frames import prepare, with_depth
from kvbench.report.front import HELD, READ, front, with_axis
from kvbench.report.pareto import ByteAxis, draw_panel
from kvbench.report.pareto_figures import draw_fronts
from kvbench.tables.plot_style import PALE, lay_out_figure, marker_styles, plot_style, save

from .conftest import reading_few

POLICIES = ["random", "streaming_llm", "keydiff", "snapkv", "adakv", "criticalkv"]


def oracle(cost, value):
    """A point is optimal if none is at least as good in both and better in one."""
    best = []
    for c, v in zip(cost, value, strict=True):
        beaten = any(c2 <= c and v2 >= v and (c2 < c or v2 > v) for c2, v2 in zip(cost, value, strict=True))
        best.append(not beaten and not np.isnan(c) and not np.isnan(v))
    return best


numbers = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, float("inf"), float("-inf"), float("nan")])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), max_size=9))
def test_front_equals_the_oracle(points):
    cost, value = [p[0] for p in points], [p[1] for p in points]
    assert front(cost, value).tolist() == oracle(cost, value)


def test_front_equals_the_oracle_for_many_points():
    rng = np.random.default_rng(0)
    cost, value = rng.integers(0, 30, 200), rng.integers(0, 30, 200)
    assert front(cost, value).tolist() == oracle(cost, value)


def test_ties_are_kept_and_failed_cells_are_not():
    assert front([1, 1, 1, 2], [5, 5, 4, np.nan]).tolist() == [True, True, False, False]
    same, order = (0.97 + 0.88 + 0.6 + 0.9) / 4, (0.6 + 0.88 + 0.9 + 0.97) / 4
    assert same != order, "the last bit of a mean depends on the order"
    assert front([3e8 / 7, 3e8 * (1 / 7)], [same, order]).tolist() == [True, True]


def test_a_title_names_task_metric_and_model(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt", "cwe"])
    draw_fronts(prepare(cells, samples), tmp_path)
    for name, title in {
        "pareto-vt": "vt, string_match · reference",
        "mean-ruler": "ruler, mean of 2 tasks, string_match · reference",
        "overview-ruler": "ruler, string_match · reference",
    }.items():
        assert title in [t.get_text() for t in drawn[name].texts]


def test_a_colour_bar_has_arrows_where_numbers_leave_it():
    for values, extend in (
        ([0.0, 1.0], "neither"), ([-0.1, np.nan], "min"), ([2.0], "max"), ([-1.0, 2.0], "both"),
        ([-1e-16, 1.0 + 1e-15], "neither"),
    ):  # fmt: skip
        page = lay_out_figure(1, 1, title="t", width=3.5, panel_height=2.0, x_label="x", y_label="y", right_margin=0.6)
        image = page.axes[0, 0].imshow([[0.0, 1.0]], vmin=0.0, vmax=1.0)
        page.colour_bar(image, values)
        assert image.colorbar.extend == extend


def test_a_figure_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    page = lay_out_figure(1, 1, title="t", width=3.5, panel_height=2.0, x_label="x", y_label="y")
    (tmp_path / "a.png").write_bytes(b"before")

    def full_disk(path, **options):
        path.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page.figure, "savefig", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*a\.png: No space left on device"):
        save(page.figure, tmp_path / "a")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.png": b"before"}


@pytest.fixture
def drawn(monkeypatch):
    """Figures instead of files."""
    kept = {}

    def keep(figure, stem, formats=()):
        kept[stem.name] = figure
        return []

    monkeypatch.setattr(pareto_figures, "save", keep)
    monkeypatch.setattr(heatmap, "save", keep)
    return kept


def overlaps(figure):
    """Pairs of drawn texts that lie on one another, and texts that leave the figure."""
    seen = []
    draw = matplotlib.text.Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matplotlib.text.Text, "draw", lambda self, r: (seen.append(self), draw(self, r))[1])
        figure.canvas.draw()
    seen = [text for text in dict.fromkeys(seen) if text.get_visible() and text.get_text()]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in seen]
    bad = [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]
    edge = figure.bbox.padded(1)
    outside = [n for n, b in boxes if not edge.contains(b.x0, b.y0) or not edge.contains(b.x1, b.y1)]
    return bad + outside


def test_no_text_lies_on_another(drawn, run_frames, tmp_path):
    tasks = ["niah_multikey_3", "qa_1"]
    cells, samples = run_frames(POLICIES, tasks=tasks)
    draw_fronts(prepare(cells, samples), tmp_path)
    assert set(drawn) == {"mean-ruler", "overview-ruler", *(f"pareto-{t}" for t in tasks)}
    for name in ("mean-ruler", "overview-ruler", "pareto-qa_1"):
        assert overlaps(drawn[name]) == [], name


def test_no_text_lies_on_another_with_panels_and_a_wide_axis(drawn, run_frames, tmp_path):
    cells, samples = run_frames(
        ["snapkv:window=64:allocate=global", "criticalkv"],
        ("0.02", "0.1", "0.5"),
        ["vt"],
        lengths=(1024, 4096),
        moments=("context", "question"),
    )
    draw_fronts(prepare(cells, samples), tmp_path)
    figure = drawn["pareto-vt"]
    assert overlaps(figure) == []
    panels = [ax for ax in figure.axes if ax.get_xscale() == "log"]
    assert len(panels) == 4


def panel(rows, memory=HELD, **options):
    page = lay_out_figure(
        1, 1, title="t", width=3.5, panel_height=2.0, x_label="x", y_label="y"
    )  # fmt: skip
    shape = {
        "unit_scaled": True,
        "score_limits": (-3.0, 103.0),
        "panel_width": 2.9,
        "bytes_axis": False,
    }
    with plot_style():
        axis = ByteAxis.of(rows[rows["policy"] != "full"], memory)
        draw_panel(page.axes[0, 0], rows, marker_styles(POLICIES), axis, **shape, **options)
    return page.axes[0, 0]


def marks(ax):
    """Where the markers of a panel stand."""
    lines = [line for line in ax.lines if line.get_marker() != "None"]
    return {pair for line in lines for pair in zip(line.get_xdata(), line.get_ydata(), strict=True)}


def test_panel_shows_scores_intervals_full_and_the_front(run_frames):
    cells, samples = run_frames(["random", "snapkv"], ("0.1", "0.4"), ["vt"])
    rows = prepare(cells, samples).cells
    ax = panel(rows)
    assert ax.get_xscale() == "linear"
    full = rows[rows["policy"] == "full"].iloc[0]
    level = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert level[0].get_ydata()[0] == pytest.approx(100 * full["score"])
    bars = np.concatenate([c.get_segments() for c in ax.collections])
    for _, row in rows[rows["policy"] != "full"].iterrows():
        ends = 100 * np.array([row["score_lo"], row["score_hi"]])
        near = [b for b in bars if np.allclose(b[:, 1], ends, atol=1e-6)]
        assert near, row["policy"]
        assert any(abs(b[0, 0] - row["share"]) < 0.03 for b in near)  # beside another bar
    step = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
    best = rows[(rows["policy"] == "snapkv")].sort_values("share")["score"]
    assert step.get_ydata()[:2] == pytest.approx(100 * best.to_numpy())


def test_front_runs_through_the_bytes_that_are_held(run_frames):
    cells, samples = run_frames(POLICIES, ("0.1", "0.2", "0.4"), ["vt"])
    rows = prepare(cells, samples).cells
    points = rows[rows["policy"] != "full"]
    best = points[front(points["kv_bytes_live"], points["score"])].sort_values("share")
    ax = panel(rows)
    step = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
    assert step.get_xdata()[:-1].tolist() == best["share"].tolist()
    assert step.get_ydata()[:-1] == pytest.approx(100 * best["score"].to_numpy())
    assert marks(ax) == set(zip(points["share"], 100 * points["score"], strict=True))


def test_a_front_over_bytes_read_runs_through_them(run_frames):
    cells, samples = run_frames(POLICIES, ("0.1", "0.4"), ["vt"])
    rows = prepare(reading_few(cells, "criticalkv"), samples).cells
    points = rows[rows["policy"] != "full"]
    ax = panel(rows, READ)
    assert marks(ax) == set(zip(points["read_share"], 100 * points["score"], strict=True))
    step = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
    best = points[oracle(points["kv_bytes_read"], points["score"])].sort_values("read_share")
    assert step.get_xdata()[:-1].tolist() == best["read_share"].tolist()
    assert "criticalkv" in set(best["policy"])
    held = points[oracle(points["kv_bytes_live"], points["score"])]
    assert set(zip(held["policy"], held["budget"], strict=True)) != set(
        zip(best["policy"], best["budget"], strict=True)
    )


def test_a_front_over_tokens_takes_no_notice_of_bytes(run_frames):
    """One policy stores twice the bytes per entry, and another reads half of the entries that it holds."""
    cells, samples = run_frames(POLICIES, ("0.1", "0.4"), ["vt"])
    cells = cells.assign(
        kv_bytes_live=cells["kv_bytes_live"] * np.where(cells["policy"] == "criticalkv", 2, 1),
        kv_bytes_read=cells["kv_bytes_read"] * np.where(cells["policy"] == "snapkv", 0.6, 1),
        budget_entries=cells["held_entries"] * np.where(cells["policy"] == "snapkv", 0.5, 1),
    )
    rows = prepare(cells, samples).cells
    points = rows[rows["policy"] != "full"]
    tokens = points["held_entries"] / 4  # the run has four KV heads
    for memory, expected in ((HELD, tokens), (READ, tokens * np.where(points["policy"] == "snapkv", 0.5, 1))):
        ax = panel(rows, with_axis(memory, "tokens"))
        assert marks(ax) == set(zip(expected, 100 * points["score"], strict=True))
        step = next(line for line in ax.lines if line.get_drawstyle() == "steps-post")
        best = oracle(expected, points["score"])
        assert step.get_xdata()[:-1].tolist() == sorted(expected[best])
    assert oracle(points["kv_bytes_live"], points["score"]) != oracle(tokens, points["score"])


def test_fronts_over_bytes_read_are_drawn_where_they_differ(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv", "adakv"], ("0.2", "0.4"), ["vt", "cwe"])
    draw_fronts(prepare(cells, samples), tmp_path)
    assert set(drawn) == {"mean-ruler", "overview-ruler", "pareto-vt", "pareto-cwe"}
    drawn.clear()
    few = reading_few(cells, "adakv")
    few = few.where(few["task"] != "cwe", cells)  # all that is held is read on this task
    draw_fronts(prepare(few, samples), tmp_path)
    assert set(drawn) == {
        *("mean-ruler", "overview-ruler", "pareto-vt", "pareto-cwe"),
        *("mean-ruler-read", "overview-ruler-read", "pareto-vt-read"),
    }
    texts = [t.get_text() for t in drawn["pareto-vt-read"].texts]
    assert "vt, string_match · reference, over bytes read" in texts
    assert any(t.startswith("KV cache read per step, % of full") for t in texts)


def test_letters_that_the_font_lacks_raise_no_warnings(run_frames, tmp_path):
    task = "\U0001f600 \u05d0\u05d1"
    cells, samples = run_frames(["\U0001f480"], ("0.2",), [task, "vt"], depths=(0, 50))
    cells = cells.assign(group="niah")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert draw_fronts(prepare(cells, samples), tmp_path)
        assert heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    assert [str(w.message) for w in caught] == []


def test_front_turns_around_where_less_is_better(run_frames):
    cells, samples = run_frames(["random", "snapkv"], ("0.1",), ["vt"])
    rows = prepare(cells, samples).cells.assign(higher_is_better=False)
    step = next(line for line in panel(rows).lines if line.get_drawstyle() == "steps-post")
    worst = rows[rows["policy"] != "full"]["score"].min()
    assert step.get_ydata()[0] == pytest.approx(100 * worst)


def test_wide_budgets_get_a_logarithmic_axis_that_says_so(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.05", "0.5"), ["vt"])
    assert panel(prepare(cells, samples).cells).get_xscale() == "log"
    draw_fronts(prepare(cells, samples), tmp_path)
    assert any("log scale" in t.get_text() for t in drawn["pareto-vt"].texts)
    cells, samples = run_frames(["snapkv"], ("0.2", "0.5"), ["vt"])
    draw_fronts(prepare(cells, samples), tmp_path)
    assert not any("log" in t.get_text() for t in drawn["pareto-vt"].texts)


def test_distances_of_several_magnitudes_get_a_logarithmic_axis_that_says_so(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["random", "snapkv", "h2o"], ("0.2", "0.5"), ["vt"])
    is_full = cells["policy"] == "full"
    for farthest, scale, label in ((2.0, "log", "kl (lower is better, log scale)"), (0.1, "linear", "kl (lower is")):
        distances = np.where(is_full, 1e-13, np.geomspace(farthest, 0.02, len(cells)))
        ends = {"score": distances, "score_lo": -distances, "score_hi": 2 * distances}
        far = cells.assign(higher_is_better=False, metric="kl", **ends)
        draw_fronts(prepare(far, samples), tmp_path)
        figure = drawn["pareto-vt"]
        low, high = figure.axes[0].get_ylim()
        assert figure.axes[0].get_yscale() == scale and high > 2 * distances.max()
        assert any(label in text.get_text() for text in figure.texts)
        assert low < distances[~is_full].min() and (low > 0.01) == (scale == "log")


def test_error_bars_never_cover_each_other(run_frames):
    """Bars of one budget stand apart wherever they overlap, and each at its point if it can."""
    cells, samples = run_frames(POLICIES, ("0.1", "0.2", "0.4"), ["vt"], samples=12)
    rows = prepare(cells, samples).cells
    ax = panel(rows)
    bars = [b for c in ax.collections for b in c.get_segments() if b[0, 0] == b[1, 0]]
    assert len(bars) == 3 * len(POLICIES)
    for a, b in itertools.combinations(bars, 2):
        apart = abs(a[0, 0] - b[0, 0]) > 1e-9
        assert apart or a[1, 1] < b[0, 1] or b[1, 1] < a[0, 1]
    shares = set(rows.loc[rows["policy"] != "full", "share"])
    assert {share for share in shares if any(b[0, 0] == share for b in bars)} == shares


def many(run_frames, tasks=("vt", "cwe")):
    """A run of twelve policies, of which four hold more or fewer bytes and share the front."""
    spread = {"criticalkv": 1.6, "adakv": 1.3, "random": 0.8}
    names = [*POLICIES, *(f"policy_{i}:window=64" for i in range(6))]
    cells, samples = run_frames(names, ("0.1", "0.2"), tasks)
    factor = cells["policy"].map(spread).fillna(1.0)
    return prepare(cells.assign(kv_bytes_live=cells["kv_bytes_live"] * factor), samples)


def test_of_many_policies_only_those_on_the_front_are_coloured_and_named(drawn, run_frames, tmp_path):
    results = many(run_frames)
    draw_fronts(results, tmp_path)
    for name, rows in (
        ("mean-ruler", results.overall),
        ("pareto-vt", results.cells[results.cells["task"] == "vt"]),
    ):
        figure = drawn[name]
        assert overlaps(figure) == [], name
        points = rows[rows["policy"] != "full"]
        best = set(points.loc[front(points["kv_bytes_live"], points["score"]), "policy"])
        assert 3 <= len(best) < 12
        (ax,) = (a for a in figure.axes if a.lines)
        assert {t.get_text() for t in ax.texts if t.get_text()} == best
        grey = {line.get_color() for line in ax.lines if line.get_markersize() == 2.5}
        assert grey == {PALE}
        assert marks(ax) == set(zip(points["share"], 100 * points["score"], strict=True))
        legend = [t.get_text() for t in figure.legends[0].get_texts()]
        assert legend == [f"{12 - len(best)} other policies", "full, 95% interval", "Pareto front"]
    overview = [t.get_text() for t in drawn["overview-ruler"].legends[0].get_texts()]
    assert {"criticalkv", "Pareto front"} < set(overview) and len(overview) < 12


def test_up_to_eight_policies_are_all_named_in_the_legend(drawn, run_frames, tmp_path):
    names = [*POLICIES, "one", "two"]
    cells, samples = run_frames(names, ("0.2",), ["vt"])
    draw_fronts(prepare(cells, samples), tmp_path)
    legend = [t.get_text() for t in drawn["pareto-vt"].legends[0].get_texts()]
    assert legend == [*names, "full, 95% interval", "Pareto front"]
    assert len({colour for colour, _ in marker_styles(names).values()}) == 8


def test_every_policy_has_its_own_look():
    many = marker_styles([str(i) for i in range(63)])
    assert len(set(many.values())) == 63
    assert marker_styles(["a", "b"])["b"] == marker_styles(["a", "b", "c"])["b"]


def test_heat_map_shows_the_means_of_depth_and_length(drawn, run_frames, tmp_path):
    cells, samples = run_frames(
        POLICIES[:4], ("0.2", "0.4"), ["niah"], group="niah", lengths=(512, 1024), samples=33,
        depths=range(0, 101, 10),
    )  # fmt: skip
    results = prepare(cells, samples)
    heatmap.draw_heatmaps(results, tmp_path)
    figure = drawn["depth-niah"]
    assert overlaps(figure) == []
    titles = {ax.get_title(loc="left").replace("\n", "") for ax in figure.axes if ax.images}
    assert len(titles) == 9
    depths = with_depth(results)
    chosen = next(a for a in figure.axes if a.get_title(loc="left") == "snapkv, 0.2")
    mine = depths[(depths["policy"] == "snapkv") & (depths["budget"] == "0.2")]
    for i, depth in enumerate(range(0, 101, 10)):
        for j, length in enumerate((512, 1024)):
            part = mine[(mine["depth"] == depth) & (mine["length"] == length)]
            assert len(part) == 3
            assert chosen.images[0].get_array()[i, j] == pytest.approx(100 * part["score"].mean())
    said = [t.get_text() for t in figure.texts]
    assert any("niah, string_match" in t and "n = 3 questions per cell" in t for t in said)


def test_heat_map_of_one_question_per_field_says_so(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["niah"], group="niah", samples=3, depths=(0, 50, 100))
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    said = " ".join(" ".join(t.get_text() for t in drawn["depth-niah"].texts).split())
    assert "n = 1 question per cell" in said


def test_heat_map_writes_the_number_of_samples_where_it_differs(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["niah"], group="niah", samples=8, depths=(0, 50, 100))
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    texts = [t.get_text() for ax in drawn["depth-niah"].axes for t in ax.texts]
    assert any(t.endswith("(3)") for t in texts)
    assert any(t.endswith("(2)") for t in texts)


def test_heat_map_leaves_out_lengths_with_nothing_but_full(drawn, run_frames, tmp_path):
    options = {"group": "niah", "samples": 6, "depths": (0, 50, 100)}
    cells, samples = run_frames(["snapkv"], ("0.2",), ["niah"], lengths=(512, 1024), **options)
    cells = cells[(cells["length"] == 512) | (cells["policy"] == "full")]
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    shapes = {ax.images[0].get_array().shape for ax in drawn["depth-niah"].axes if ax.images}
    assert shapes >= {(3, 1)}
    assert (3, 2) not in shapes


def test_no_heat_map_without_depths(drawn, run_frames, tmp_path):
    cells, samples = run_frames(tasks=["niah_single_1", "vt"])
    assert heatmap.draw_heatmaps(prepare(cells, samples), tmp_path) == []
    cells, samples = run_frames(tasks=["niah_single_1"], depths=(0, 50))
    some = samples.assign(extra=["{}", *samples["extra"][1:]])  # the id still ends in its depth
    assert heatmap.draw_heatmaps(prepare(cells, some), tmp_path) == []
    assert not drawn
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    assert drawn


def test_repeats_of_a_question_count_once(drawn, run_frames, tmp_path):
    cells, samples = run_frames(["snapkv"], ("0.2",), ["vt"], samples=6, depths=(0, 50, 100))
    twice = pd.concat([samples, samples.assign(repeat=1)])
    heatmap.draw_heatmaps(prepare(cells, twice), tmp_path)
    assert any("n = 2 questions per cell" in " ".join(t.get_text().split()) for t in drawn["depth-vt"].texts)
