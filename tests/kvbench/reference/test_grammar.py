"""The vocabulary and templates of the reference model's language."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbench.reference import grammar


def test_vocabulary_layout_is_the_one_of_the_weights() -> None:
    vocabulary = grammar.VOCABULARY
    assert len(vocabulary) == len(set(vocabulary)) == 1024
    assert vocabulary[:6] == ("<pad>", "<bos>", "<eos>", "<unk>", "<q>", ".")
    assert vocabulary[64:160] == tuple(f"#{n}" for n in range(1, 97))
    assert vocabulary[160:672] == grammar.WORDS
    assert grammar.WORDS[:3] == ("solaz", "zaziv", "livat")


def test_pool_words_have_one_length_and_shape() -> None:
    for word in grammar.WORDS:
        assert len(word) == 5
        assert [letter in "aeiou" for letter in word] == [False, True, False, True, False]


def test_templates() -> None:
    assert " ".join(grammar.needle(["k"], ["a", "b"])) == "note k a b ."
    assert " ".join(grammar.ask(["k", "l"])) == "<q> k l"
    assert " ".join(grammar.ask("k")) == "<q> k"
    assert " ".join(grammar.answer([["a", "b"], ["c", "d"]])) == "a b , c d ."
    assert " ".join(grammar.ask_each(["k", "l"])) == "each k l :"
    assert " ".join(grammar.answer_each(["k", "l"], [["a"], ["b"]])) == "k a , l b ."
    assert " ".join(grammar.assign("n", "a")) == "let n a ."
    assert " ".join(grammar.ask_chain("n")) == "follow n"
    assert " ".join(grammar.item(2, ["a", "b"])) == "item #2 a b ."
    assert " ".join(grammar.answer_list([["a", "b"], ["c", "d"]])) == "#1 a b , #2 c d ."
    assert " ".join(grammar.passage(["a", "b"])) == "begin a b end"
    assert " ".join(grammar.turn(["a", "."])) == "user a ."
    assert grammar.ask_common() == ["<q>", "common"]
    assert grammar.ask_top() == ["<q>", "top"]
    assert grammar.ask_list() == ["<q>", "list"]
    assert grammar.ask_copy() == ["<q>", "copy"]
    assert grammar.answer_words(["a"]) == ["a", "."]


@pytest.mark.parametrize("number", [0, 97])
def test_numerals_end(number: int) -> None:
    with pytest.raises(ValueError, match="no numeral"):
        grammar.numeral(number)


def test_grammar_and_package_import_without_torch() -> None:
    code = (
        "import sys; import kvbench.reference.grammar; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
