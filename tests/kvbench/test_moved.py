"""Modules that have moved can be imported under their old names."""

from __future__ import annotations

import importlib

import pytest

from kvbench.moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_an_old_name_is_the_same_module(old: str) -> None:
    assert importlib.import_module(old) is importlib.import_module(MOVED[old])
    assert importlib.import_module(old).__name__ == MOVED[old]


def test_modules_of_a_moved_package_are_no_copies() -> None:
    from kvbench.recipes.items import PaperItem as Old  # type: ignore[import-not-found]

    from kvbench.papers.recipes.items import PaperItem

    assert Old is PaperItem


def test_a_module_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"recipes\.nothing"):
        importlib.import_module("kvbench.recipes.nothing")
