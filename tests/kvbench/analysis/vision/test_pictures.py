"""How images are laid out and painted, on small examples by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvbench.analysis.retention.steps import Trace
from kvbench.analysis.vision.grids import ImageView
from kvbench.analysis.vision.image_shares import CellRecord
from kvbench.analysis.vision.pictures import arrange_images, cell_of, drawn_steps, outline, paint


def test_a_held_cell_is_clear_and_an_evicted_one_is_faded_and_grey() -> None:
    picture = np.zeros((4, 6, 3), np.uint8)
    picture[..., 0] = 200
    held = np.array([[1.0, 0.0, 0.0], [0.0, 0.5, 1.0]])
    painted = paint(picture, held)
    for y in range(4):
        for x in range(6):
            share = held[y // 2, x // 2]
            red, green, blue = painted[y, x].astype(int)
            assert green == blue
            if share == 1:
                assert (red, green) == (200, 0)
            elif share == 0:
                assert red == green > 180
            else:
                assert 0 < green < red
    assert np.array_equal(paint(picture, np.ones((2, 3))), picture)


def test_pixels_that_no_cell_divides_evenly_go_to_the_cell_that_covers_them() -> None:
    assert cell_of(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert cell_of(4, 4).tolist() == [0, 1, 2, 3]


def test_the_outline_lies_between_held_and_evicted_cells() -> None:
    held = np.array([[True, True, False], [False, True, False]])
    edges = outline(held, height=20, width=60)
    # An L of three cells has eight edges of one cell's length.
    assert len(edges) == len(set(edges)) == 8
    assert set(edges) == {
        ((0, 0), (20, 0)), ((20, 0), (40, 0)), ((0, 10), (20, 10)), ((20, 20), (40, 20)),
        ((0, 0), (0, 10)), ((40, 0), (40, 10)), ((20, 10), (20, 20)), ((40, 10), (40, 20)),
    }  # fmt: skip


def test_images_do_not_overlap_and_keep_their_shape() -> None:
    shapes = [(30, 60), (90, 30), (50, 50), (10, 40), (64, 64)]
    views = [ImageView(np.zeros((*shape, 3), np.uint8), 1, 1, 0) for shape in shapes]
    placed, (height, width) = arrange_images(views)
    taken = np.zeros((height, width), int)
    for one, shape in zip(placed, shapes, strict=True):
        down, across = one.picture.shape[:2]
        taken[one.top_offset : one.top_offset + down, one.left_offset : one.left_offset + across] += 1
        assert down / across == pytest.approx(shape[0] / shape[1], rel=0.05)
        assert max(down, across) == pytest.approx(max(placed[0].picture.shape[:2]), abs=1)
    assert taken.max() == 1
    assert taken.sum() == sum(p.picture.shape[0] * p.picture.shape[1] for p in placed)


def test_steps_between_which_no_visual_token_goes_share_a_panel() -> None:
    prompt, answer = 4, 9
    gone = torch.full((1, 1, prompt + answer), prompt + answer, dtype=torch.int32)
    gone[0, 0, :3] = torch.tensor([3, 6, 8])  # in the prompt, at step 3 and at step 5
    kept = CellRecord(None, Trace(gone, 4, 3), prompt, "")  # type: ignore[arg-type]
    shown: Any = SimpleNamespace(visual=torch.tensor([True, True, False, False]))
    assert kept.steps == 10
    assert kept.evicted[0, 0].tolist() == [0, 3, 5, 10]
    assert drawn_steps(kept, shown, 2) == [(0, "step 0"), (9, "step 9")]
    assert drawn_steps(kept, shown, 10) == [(0, "steps 0 to 2"), (3, "steps 3 to 9")]
    shown.visual = torch.tensor([True, False, False, False])
    assert drawn_steps(kept, shown, 2) == [(0, "steps 0 to 9")]
    assert drawn_steps(kept, shown, 1) == [(0, "step 0")]
