"""The language of the reference model: its vocabulary and its sentence templates.

Everything the model is ever shown has the form *context, question, answer*. Training samples and
the benchmark's tasks both build their text with the functions below, so that the two cannot drift
apart. All functions take and return lists of words; one word is one token. A text is its words
joined by single spaces.

Every answer ends with :data:`STOP`. Keys, values, variables and filler are all drawn from the one
pool :data:`WORDS`: nothing about a token by itself says whether it will be asked for, so an
eviction method cannot win by recognising token types.

The order of :data:`VOCABULARY` fixes the token ids of the shipped weights. It never changes.
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
    f"{PAD} {BOS} {EOS} {UNK} {QUESTION} {STOP} {COMMA} : note let each follow item list copy "
    "common top user begin end"
).split()
_SIZE = 1024
_FIRST_NUMERAL = 64
_NUMERALS = 96
_POOL = 512


def _spares(first: int, count: int) -> list[str]:
    """Return `count` placeholder words, numbered from `first`."""
    return [f"<spare_{n}>" for n in range(first, first + count)]


def _pseudo_words(count: int, taken: Iterable[str]) -> list[str]:
    """Return distinct pronounceable words of the shape consonant-vowel-consonant-vowel-consonant.

    All have five letters, so that none is part of another and searching an answer in a text by
    substring is exact. The generator is written out rather than taken from `random`, so that no
    Python version can change a token id.
    """
    consonants, vowels = "bdfgklmnprstvz", "aeiou"
    used = set(taken)
    words: list[str] = []
    state = 1
    while len(words) < count:
        letters = []
        for alphabet in (consonants, vowels, consonants, vowels, consonants):
            state = (state * 1103515245 + 12345) % 2**31
            letters.append(alphabet[(state >> 16) % len(alphabet)])
        word = "".join(letters)
        if word not in used:
            used.add(word)
            words.append(word)
    return words


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
        ValueError: `number` has no numeral.
    """
    return ["item", numeral(number), *_words(value), STOP]


def passage(words: Sequence[str]) -> list[str]:
    """Return a passage that :func:`ask_copy` asks to repeat."""
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
        raise ValueError(f"no numeral for {number}: 1 to {len(NUMERALS)} exist")
    return NUMERALS[number - 1]


# Questions -------------------------------------------------------------------------------------


def ask(key: Sequence[str]) -> list[str]:
    """Return the question for the value or values of `key`; see :func:`answer`."""
    return [QUESTION, *_words(key)]


def ask_each(keys: Sequence[str]) -> list[str]:
    """Return the question for the values of several one-word keys; see :func:`answer_each`."""
    return ["each", *keys, ":"]


def ask_chain(value: str) -> list[str]:
    """Return the question for the variables that hold `value`; see :func:`answer_words`."""
    return ["follow", value]


def ask_common() -> list[str]:
    """Return the question for the ten common words; see :func:`answer_words`."""
    return [QUESTION, "common"]


def ask_top() -> list[str]:
    """Return the question for the three most frequent words; see :func:`answer_words`."""
    return [QUESTION, "top"]


def ask_list() -> list[str]:
    """Return the question for the list of all items; see :func:`answer_list`."""
    return [QUESTION, "list"]


def ask_copy() -> list[str]:
    """Return the question for the words of the passage; see :func:`answer_words`."""
    return [QUESTION, "copy"]


# Answers ---------------------------------------------------------------------------------------


def answer(values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to :func:`ask`: ``a b , c d .``, `values` in order of appearance."""
    return _joined(values)


def answer_each(keys: Sequence[str], values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to :func:`ask_each`: ``k1 a b , k2 c d .``, keys in the order asked.

    The key is repeated so that every step of the answer can be found by looking back.
    """
    return _joined([[key, *value] for key, value in zip(keys, values, strict=True)])


def answer_list(values: Sequence[Sequence[str]]) -> list[str]:
    """Return the answer to :func:`ask_list`: ``#1 a b , #2 c d .``, `values` from entry 1 on."""
    return _joined([[numeral(n), *value] for n, value in enumerate(values, 1)])


def answer_words(words: Sequence[str]) -> list[str]:
    """Return `words` and the full stop: the answer to a question for plain words."""
    return [*words, STOP]


def _words(text: Sequence[str]) -> list[str]:
    """Return `text` as a list of words; a bare string counts as one word."""
    return [text] if isinstance(text, str) else list(text)


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return `parts` with commas between them and the full stop at the end."""
    words: list[str] = []
    for part in parts:
        words += [*_words(part), COMMA]
    return [*words[:-1], STOP]
