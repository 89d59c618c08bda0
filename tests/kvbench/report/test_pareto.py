"""The Pareto front against a quadratic oracle, and what the figures show."""

from __future__ import annotations

import itertools
import warnings

import matplotlib.text
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.report import figures, heatmap
from kvbench.report.figures import draw_fronts
from kvbench.report.frames import prepare
from kvbench.report.pareto import draw_panel, front
from kvbench.report.style import house_style, looks, sheet

POLICIES = ["random", "streaming_llm", "keydiff", "snapkv", "adakv", "criticalkv"]


def oracle(cost, value):
    """A point is optimal if none is at least as good in both and better in one."""
    best = []
    for c, v in zip(cost, value, strict=True):
        beaten = any(
            c2 <= c and v2 >= v and (c2 < c or v2 > v) for c2, v2 in zip(cost, value, strict=True)
        )
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


@pytest.fixture
def drawn(monkeypatch):
    """Figures instead of files."""
    kept = {}

    def keep(figure, stem):
        kept[stem.name] = figure
        return []

    monkeypatch.setattr(figures, "save", keep)
    monkeypatch.setattr(heatmap, "save", keep)
    return kept


def overlaps(figure):
    """Pairs of drawn texts that lie on one another, and texts that leave the figure."""
    seen = []
    draw = matplotlib.text.Text.draw
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            matplotlib.text.Text, "draw", lambda self, r: (seen.append(self), draw(self, r))[1]
        )
        figure.canvas.draw()
    seen = [text for text in dict.fromkeys(seen) if text.get_visible() and text.get_text()]
    boxes = [(t.get_text(), t.get_window_extent().shrunk(0.98, 0.9)) for t in seen]
    bad = [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]
    edge = figure.bbox.padded(1)
    outside = [
        n for n, b in boxes if not edge.contains(b.x0, b.y0) or not edge.contains(b.x1, b.y1)
    ]
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


def panel(rows, **options):
    page = sheet(
        1, 1, width=3.5, panel=2.0, labels=[], handles=[], x_label="x", y_label="y"
    )  # fmt: skip
    shape = {"unit": True, "limits": (-3.0, 103.0), "width": 2.9, "bytes_axis": False}
    with house_style():
        draw_panel(page.axes[0, 0], rows, looks(POLICIES), **shape, **options)
    return page.axes[0, 0]


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
        assert any(abs(b[0, 0] - row["share"]) < 0.03 for b in near)  # but for the side step
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
    marks = {x for line in ax.lines if line.get_marker() != "None" for x in line.get_xdata()}
    assert marks - set(points["share"])  # the markers still stand side by side


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


def test_wide_budgets_get_a_logarithmic_axis(run_frames):
    cells, samples = run_frames(["snapkv"], ("0.05", "0.5"), ["vt"])
    assert panel(prepare(cells, samples).cells).get_xscale() == "log"


def test_every_policy_has_its_own_look():
    many = looks([str(i) for i in range(63)])
    assert len(set(many.values())) == 63
    assert looks(["a", "b"])["b"] == looks(["a", "b", "c"])["b"]


def test_heat_map_shows_the_means_of_depth_and_length(drawn, run_frames, tmp_path):
    cells, samples = run_frames(
        POLICIES[:4], ("0.2", "0.4"), ["niah"], group="niah", lengths=(512, 1024), samples=33,
        depths=range(0, 101, 10),
    )  # fmt: skip
    results = prepare(cells, samples)
    heatmap.draw_heatmaps(results, tmp_path)
    figure = drawn["niah-depth-niah"]
    assert overlaps(figure) == []
    titles = {ax.get_title(loc="left").replace("\n", "") for ax in figure.axes if ax.images}
    assert len(titles) == 9
    depths = heatmap.with_depth(results)
    chosen = next(a for a in figure.axes if a.get_title(loc="left") == "snapkv, 0.2")
    mine = depths[(depths["policy"] == "snapkv") & (depths["budget"] == "0.2")]
    for i, depth in enumerate(range(0, 101, 10)):
        for j, length in enumerate((512, 1024)):
            part = mine[(mine["depth"] == depth) & (mine["length"] == length)]
            assert len(part) == 3
            assert chosen.images[0].get_array()[i, j] == pytest.approx(100 * part["score"].mean())
    assert any("n = 3 per field" in t.get_text() for t in figure.texts)


def test_heat_map_writes_the_number_of_samples_where_it_differs(drawn, run_frames, tmp_path):
    cells, samples = run_frames(
        ["snapkv"], ("0.2",), ["niah"], group="niah", samples=8, depths=(0, 50, 100)
    )
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    texts = [t.get_text() for ax in drawn["niah-depth-niah"].axes for t in ax.texts]
    assert any(t.endswith("(3)") for t in texts)
    assert any(t.endswith("(2)") for t in texts)


def test_heat_map_leaves_out_lengths_with_nothing_but_full(drawn, run_frames, tmp_path):
    options = {"group": "niah", "samples": 6, "depths": (0, 50, 100)}
    cells, samples = run_frames(["snapkv"], ("0.2",), ["niah"], lengths=(512, 1024), **options)
    cells = cells[(cells["length"] == 512) | (cells["policy"] == "full")]
    heatmap.draw_heatmaps(prepare(cells, samples), tmp_path)
    shapes = {ax.images[0].get_array().shape for ax in drawn["niah-depth-niah"].axes if ax.images}
    assert shapes >= {(3, 1)}
    assert (3, 2) not in shapes


def test_no_heat_map_without_depths(drawn, run_frames, tmp_path):
    cells, samples = run_frames(tasks=["niah_single_1", "vt"])
    assert heatmap.draw_heatmaps(prepare(cells, samples), tmp_path) == []
    cells, samples = run_frames(tasks=["vt"], depths=(0, 50))
    assert heatmap.draw_heatmaps(prepare(cells, samples), tmp_path) == []
    assert not drawn
