"""Facts about plugins are computed once per state of the plugins' code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvbench import registry
from kvbench.errors import UserError
from kvbench.plugin_facts import PluginFacts

state = registry.code_state.__wrapped__


@pytest.fixture
def command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of the command line with an empty cache."""
    monkeypatch.setattr(PluginFacts, "uses_cache", True)
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "code_state", lambda: "state 1")


def ask(question: str, answer: object) -> object:
    with PluginFacts() as facts:
        return facts.get(question, lambda: answer)


@pytest.mark.usefixtures("command_line")
def test_an_answer_is_computed_once_per_question_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [ask("a", [1]), ask("a", [2]), ask("b", [3]), ask("a", [4])] == [[1], [1], [3], [1]]
    monkeypatch.setattr(registry, "code_state", lambda: "state 2")
    assert [ask("a", [5]), ask("b", [6]), ask("a", [7])] == [[5], [6], [5]]


@pytest.mark.usefixtures("command_line")
def test_an_error_is_not_stored_and_spoils_no_other_answer(tmp_path: Path) -> None:
    def failing() -> None:
        raise UserError("not installed")

    with PluginFacts() as facts:
        facts.get("a", lambda: 1)
        with pytest.raises(UserError):
            facts.get("b", failing)
    assert [ask("a", 2), ask("b", 3)] == [1, 3]
    (stored,) = (tmp_path / "cache").iterdir()
    for damaged in ("", "[]", '{"state": "state 1"}'):
        stored.write_text(damaged)
        assert ask("a", 4) == 4


@pytest.mark.usefixtures("command_line")
def test_a_policy_of_a_file_is_asked_each_time() -> None:
    def about(spelling: str, answer: int) -> object:
        with PluginFacts() as facts:
            return facts.get_of_policy(spelling, "size of", lambda: answer)

    assert [about("snapkv:window=8", n) for n in (1, 2)] == [1, 1]
    assert [about("./my.py:mine:window=8", n) for n in (1, 2)] == [1, 2]


def test_nothing_is_stored_outside_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path))
    assert [ask("a", 1), ask("a", 2)] == [1, 2]
    assert not list(tmp_path.iterdir())


def test_the_state_changes_with_every_module_of_a_plugin_and_nothing_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kvb_state_plugin"
    (package / "inner").mkdir(parents=True)
    files = [package / "__init__.py", package / "inner" / "a.py", tmp_path / "kvb_state_module.py"]
    for file in files:
        file.write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_recorded_packages", lambda: {"kvb_state_plugin", "kvb_state_module", "kvb_gone"})
    states = [state()]
    assert state() == states[0]
    for file in files:
        file.write_text("raise ValueError()")  # longer by a letter
        states.append(state())
        os.utime(file, ns=(0, 0))
        states.append(state())
    (package / "inner" / "b.py").touch()
    states.append(state())
    (package / "inner" / "data.json").touch()
    assert state() == states[-1]
    monkeypatch.setattr(registry, "_entries", lambda group: {})
    states.append(state())
    assert len(set(states)) == len(states) == 9
