from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Literal

import pytest

from kvbench.plugin import Score

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return script("make_policies")


@dataclass(frozen=True)
class Base(Score):
    """The base.

    Attributes:
        width: How wide,
            in tokens.
        first, second: Both | the same.
    """

    name: ClassVar[str] = "base"
    width: int | None = None
    first: float = 0.5
    second: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Derived(Base):
    """A score.

    More of it, `a | b`.

    Attributes:
        first: The derived one.
        extra: Whether.
    """

    name: ClassVar[str] = "derived"
    extra: bool = False


def test_the_page_of_the_policies_is_up_to_date(maker: ModuleType) -> None:
    assert maker.gaps() == []
    assert maker.main(["--check"]) == 0, "python docs/make_policies.py"


def test_meanings_are_read_from_docstrings_and_inherited(maker: ModuleType) -> None:
    assert maker.meanings(Derived()) == {
        "width": "How wide, in tokens.",
        "first": "The derived one.",
        "second": "Both | the same.",
        "extra": "Whether.",
    }
    assert maker.sections(Derived)[0] == "A score.\n\nMore of it, `a | b`."
    text = "\n".join(maker.one_part("score", "derived", Derived()))
    assert "| `width` | `none` | whole number or `none` | How wide, in tokens. |" in text
    assert "| `second` | `a` | `a`, `b` | Both \\| the same. |" in text
    assert "| `extra` | `false` | `true`, `false` | Whether. |" in text


def test_every_link_of_the_page_leads_somewhere(maker: ModuleType) -> None:
    import re

    text = maker.page()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
    assert len(set(anchors)) == len(anchors)
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= set(anchors)


def test_a_stale_page_is_one_line_and_status_1(
    maker: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(maker, "PAGE", tmp_path / "policies.md")
    assert maker.main(["--check"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert maker.main([]) == 0
    assert maker.main(["--check"]) == 0
    (tmp_path / "policies.md").write_text("old", encoding="utf-8")
    assert maker.main(["--check"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_page_of_published_figures_lists_the_contradictions_that_the_check_finds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published = script("make_published")
    assert published.main(["--check"]) == 0
    old = tmp_path / "published.md"
    old.write_text(published.PAGE.read_text().replace("51.67", "51.97"))
    monkeypatch.setattr(published, "PAGE", old)
    assert published.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert published.main([]) == 0
    assert "51.67" in old.read_text()


def test_the_page_of_the_recipes_is_up_to_date(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = script("make_recipes")
    assert made.main(["--check"]) == 0, "python docs/make_recipes.py"
    old = tmp_path / "recipes.md"
    old.write_text(made.PAGE.read_text().replace("LongProc: Countdown", "Countdown"))
    monkeypatch.setattr(made, "PAGE", old)
    assert made.main(["--check"]) == 1
    assert "out of date" in capsys.readouterr().out
    assert made.main([]) == 0
    assert "LongProc: Countdown" in old.read_text()
