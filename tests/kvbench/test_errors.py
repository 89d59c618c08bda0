"""Messages show at most 200 characters of a value, and no error of a plugin stops them."""

from __future__ import annotations

import pytest

from kvbench.errors import (
    PluginError,
    UserError,
    first_lines,
    message_of,
    out_of_memory,
    plugin_call,
    quoted,
    reason_of,
    shorten,
    unknown,
)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NoText(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


@pytest.mark.parametrize("value", ["x" * 5000, "x y " * 2000, ["a"] * 5000, 10**400, [10**5000], {"a": "b" * 300}])
def test_a_quoted_value_has_at_most_200_characters(value: object) -> None:
    assert len(quoted(value)) <= 200


def test_a_short_value_is_quoted_whole() -> None:
    assert quoted("x" * 198) == repr("x" * 198)
    assert quoted(["a", 1]) == "['a', 1]"


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    text = shorten("begin" + "-" * 500 + "end.jsonl:12")
    assert text.startswith("begin-")
    assert text.endswith("-end.jsonl:12")
    assert "..." in text


def test_a_long_word_of_a_message_is_shortened_and_its_sentences_are_not() -> None:
    sentences = "a sentence of many words " * 20
    assert str(UserError(sentences)) == sentences
    message = str(UserError(f"cannot read /{'x' * 4000}.yaml: no such file"))
    assert len(message) < 240
    assert message.endswith("x.yaml: no such file")


def test_an_unknown_name_is_shortened() -> None:
    for name in ("x" * 5000, 10**5000, [["x"] * 5000]):
        assert len(str(unknown("task", name, ["vt", "cwe"]))) < 300


@pytest.mark.parametrize("error", [Unprintable(), NoText()])
def test_an_error_whose_text_raises_is_still_one_line(error: Exception) -> None:
    assert "its __str__ raises" in message_of(error)
    assert reason_of(error).startswith(f"{type(error).__name__}: ")
    assert type(error).__name__ in first_lines(error)
    assert not out_of_memory(error)
    with pytest.raises(PluginError, match="its __str__ raises"), plugin_call():
        raise error


def test_a_plugins_long_message_is_shortened() -> None:
    assert len(reason_of(RuntimeError("x" * 5000))) < 300
