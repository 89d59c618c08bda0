"""A setting of a training is one declaration: flag, default, check, and where it applies."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kvbench.cli.options import declared_options, split_options
from kvbench.errors import UserError
from kvbench.registry import TRAINERS, get
from kvbench.training import options, settings
from kvbench.training.options import TrainingOptions


def test_a_new_setting_is_one_declaration(monkeypatch: pytest.MonkeyPatch) -> None:
    declaration: Any = options._setting(
        int, "Loss", "N", "A new one.", options._count(3), default=5, objectives=("distil",)
    )
    grown: Any = make_dataclass("Grown", [("novel", int | None, declaration)], bases=(TrainingOptions,), frozen=True)
    monkeypatch.setattr(options, "TrainingOptions", grown)
    monkeypatch.setattr(settings, "TrainingOptions", grown)
    given: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command()(declared_options(grown)(lambda **values: given.append(split_options(values, grown)[0])))
    result = CliRunner().invoke(app, ["--novel", "7"])
    assert result.exit_code == 0 and given[0]["novel"] == 7
    assert "A new one." in CliRunner().invoke(app, ["--help"]).output
    trimkv, kvzap = get(TRAINERS, "trimkv"), get(TRAINERS, "kvzap")
    assert settings.complete(trimkv, "m", 0, {})["novel"] == 5
    assert settings.complete(trimkv, "m", 0, {"novel": 8})["novel"] == 8
    with pytest.raises(UserError, match="--novel 2 is too small; use 3 or more"):
        settings.complete(trimkv, "m", 0, {"novel": 2})
    with pytest.raises(UserError, match="--novel does not apply to kvzap"):
        settings.complete(kvzap, "m", 0, {"novel": 8})


@pytest.mark.parametrize(
    ("name", "flag"), [("kl", "--no-kl"), ("column", "--text-column"), ("tied", "--tied"), ("lr", "--lr")]
)
def test_messages_name_the_flag(name: str, flag: str) -> None:
    assert options.flag_of(name) == flag
