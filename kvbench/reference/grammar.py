"""The language of the reference model: its vocabulary and its sentence templates.

All text of the model has the form *context, question, answer*. Training samples and the tasks of
the benchmarks both build their text with these functions, so that the two cannot diverge. All
functions take and return lists of words; one word is one token. A text is its words joined by
single spaces.

Every answer ends with `STOP`. Keys, values, variables and filler are all drawn from one pool,
`WORDS`. A token alone does not show whether a question will ask for it, so an eviction method
cannot win by recognising kinds of tokens.

The order of `VOCABULARY` fixes the token ids of the shipped weights. It never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAD = "<pad>"
BOS = "<bos>"
EOS = "<eos>"
UNK = "<unk>"
QUESTION = "<q>"
STOP = "."
COMMA = ","

_NAMED = (
    f"{PAD} {BOS} {EOS} {UNK} {QUESTION} {STOP} {COMMA} : note let each follow item list copy common top user begin end"
).split()
_SIZE = 1024
_FIRST_NUMERAL = 64
_NUMERALS = 96
_POOL = 512


def _spares(first_number: int, spare_count: int) -> list[str]:
    """Return `spare_count` placeholder words, numbered from `first_number`."""
    return [f"<spare_{number}>" for number in range(first_number, first_number + spare_count)]


def _pseudo_words(word_count: int, reserved_words: Iterable[str]) -> list[str]:
    """Return distinct pronounceable words of the shape consonant-vowel-consonant-vowel-consonant.

    All words have five letters, so that no word is part of another and a search for an answer in a
    text is exact. The generator does not use `random`, so that no Python version can change a token
    id.
    """
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    used_words = set(reserved_words)
    pseudo_words: list[str] = []
    state = 1
    while len(pseudo_words) < word_count:
        letters = []
        for alphabet in (consonants, vowels, consonants, vowels, consonants):
            state = (state * 1103515245 + 12345) % 2**31
            letters.append(alphabet[(state >> 16) % len(alphabet)])
        pseudo_word = "".join(letters)
        if pseudo_word not in used_words:
            used_words.add(pseudo_word)
            pseudo_words.append(pseudo_word)
    return pseudo_words


SPECIALS: tuple[str, ...] = (*_NAMED, *_spares(0, _FIRST_NUMERAL - len(_NAMED)))
NUMERALS: tuple[str, ...] = tuple(f"#{n}" for n in range(1, _NUMERALS + 1))
WORDS: tuple[str, ...] = tuple(_pseudo_words(_POOL, _NAMED))
VOCABULARY: tuple[str, ...] = (
    *SPECIALS,
    *NUMERALS,
    *WORDS,
    *_spares(_FIRST_NUMERAL - len(_NAMED), _SIZE - len(SPECIALS) - len(NUMERALS) - len(WORDS)),
)


# Statements ------------------------------------------------------------------------------------


def needle(key: Sequence[str], value: Sequence[str]) -> list[str]:
    """Return the statement that `key` (1 or 2 words) has `value` (2 or 4 words)."""
    return ["note", *_words(key), *_words(value), STOP]


def assign(source: str, variable: str) -> list[str]:
    """Return the statement that `variable` holds what `source` (a value or variable) holds."""
    return ["let", source, variable, STOP]


def item(number: int, value: Sequence[str]) -> list[str]:
    """Return the statement that entry `number` (1 to 96) of the list is `value`.

    Raises:
        ValueError: `number` is not within 1 to 96.
    """
    return ["item", numeral(number), *_words(value), STOP]


def passage(words: Sequence[str]) -> list[str]:
    """Return a passage that `ask_copy` asks to repeat."""
    return ["begin", *words, "end"]


def turn(words: Sequence[str]) -> list[str]:
    """Return one turn of a dialogue; its question, if any, follows."""
    return ["user", *words]


def sentence(words: Sequence[str]) -> list[str]:
    """Return a sentence of filler."""
    return [*words, STOP]


def numeral(number: int) -> str:
    """Return the word for `number`.

    Raises:
        ValueError: `number` is not within 1 to 96.
    """
    if not 1 <= number <= len(NUMERALS):
        raise ValueError(f"no numeral for {number}; use 1 to {len(NUMERALS)}")
    return NUMERALS[number - 1]


# Questions -------------------------------------------------------------------------------------


def ask(key: Sequence[str]) -> list[str]:
    """Return the question for the value or values of `key`; see `answer`."""
    return [QUESTION, *_words(key)]


def ask_each(keys: Sequence[str]) -> list[str]:
    """Return the question for the values of several one-word keys; see `answer_each`."""
    return ["each", *keys, ":"]


def ask_chain(value: str) -> list[str]:
    """Return the question for the variables that hold `value`; see `answer_words`."""
    return ["follow", value]


def ask_common() -> list[str]:
    """Return the question for the ten common words; see `answer_words`."""
    return [QUESTION, "common"]


def ask_top() -> list[str]:
    """Return the question for the three most frequent words; see `answer_words`."""
    return [QUESTION, "top"]


def ask_list() -> list[str]:
    """Return the question for the list of all items; see `answer_list`."""
    return [QUESTION, "list"]


def ask_copy() -> list[str]:
    """Return the question for the words of the passage; see `answer_words`."""
    return [QUESTION, "copy"]


# Answers ---------------------------------------------------------------------------------------


def answer(values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to `ask`: ``a b , c d .``, with `values` in order of appearance."""
    return _join_phrases(values)


def answer_each(keys: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to `ask_each`: ``k1 a b , k2 c d .``, with keys in the question's order.

    It repeats each key, so that the model can look up every step of the answer.
    """
    return _join_phrases([[key, *value] for key, value in zip(keys, values, strict=True)])


def answer_list(values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to `ask_list`: ``#1 a b , #2 c d .``, with `values` from entry 1 on."""
    return _join_phrases([[numeral(number), *value] for number, value in enumerate(values, 1)])


def answer_words(words: Sequence[str]) -> list[str]:
    """Return `words` and the full stop: the answer to a question for plain words."""
    return [*words, STOP]


def _words(phrase: Sequence[str]) -> list[str]:
    """Return `phrase` as a list of words; a bare string counts as one word."""
    return [phrase] if isinstance(phrase, str) else list(phrase)


def _join_phrases(phrases: Sequence[Sequence[str]]) -> list[str]:
    """Return `phrases` with commas between them and the full stop at the end."""
    words: list[str] = []
    for phrase in phrases:
        words += [*_words(phrase), COMMA]
    return [*words[:-1], STOP]
