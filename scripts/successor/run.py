"""kvbench run, with needle tasks in the language of an attempt instead of reference-1's.

    python -m scripts.successor.run prose --model DIR/deep --policy full,snapkv \
        --task niah_single_1,niah_single_2,niah_multikey_1 --length 1024 --out RUN

What follows the language, `words` or `prose`, or `digits` for prose with ten digits, are options of
`kvbench run`. Cells of such a run are no cells of the reference model: never add them to its runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from kvbench.cli import main as kvbench
from kvbench.errors import UserError
from kvbench.reference import grammar
from kvbench_tasks.synthetic import generate
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, scatter, shuffle
from kvbench_tasks.synthetic.lexicon import Niah
from kvbench_tasks.synthetic.reference import ReferenceLexicon
from scripts.successor.language import VALUE, Filler, Kind, ask, keys_of, needle, value

_LANGUAGES: dict[str, tuple[Kind, int]] = {
    "words": ("words", 96),
    "prose": ("prose", 96),
    "digits": ("prose", 10),
}


class AttemptLexicon(ReferenceLexicon):
    """Needles with one value of seven tokens; one key is asked for."""

    kind: ClassVar[Kind]
    numerals: ClassVar[int]

    def niah(self, task: Niah, depths: Sequence[float] | None = None) -> list[HaystackPlan]:
        """See `Lexicon.niah`.

        Raises:
            UserError: The task is not about needles in noise or an essay, with one number each.
        """
        if task not in (Niah("noise"), Niah("essay"), Niah("essay", keys=task.keys)):
            raise UserError(
                "the attempts know needles with one number only; use niah_single_1, niah_single_2 or niah_multikey_1"
            )
        names = list(keys_of(self.kind))
        shuffle(self.streams["pool"], names)
        keys, rest = names[: task.keys], names[task.keys :]
        draw = self.streams["free"].random
        values = [value(draw, self.kind, rest, VALUE, self.numerals) for _ in keys]
        rng = self.streams["depth"]
        places = depths if depths is not None else [rng.random() for _ in keys]
        needles = [
            (place, " ".join(needle(self.kind, key, words)))
            for place, key, words in zip(places, keys, values, strict=True)
        ]
        asked = self.streams["query"].randrange(task.keys)
        source = Filler(self.streams["filler"].random, self.kind, rest, self.numerals)
        fixed = source.sentence()
        sentences: list[list[str]] = []

        def filler(count: int) -> list[str]:
            while sum(map(len, sentences)) < count:
                sentences.append(fixed if task.haystack == "noise" else source.sentence())
            texts, left = [], count
            for words in sentences:
                if left > 0:
                    texts.append(" ".join(words[:left]))
                    left -= len(words)
            return texts

        def build(count: int) -> Doc:
            pieces = scatter(filler(count), needles)
            found = values[asked]
            question = ask(self.kind, keys[asked])
            return self._doc(pieces, question, [" ".join(found)], [*found, grammar.STOP])

        return [HaystackPlan(build)]


def lexicon_of(language: str) -> type[AttemptLexicon]:
    """The lexicon of `words`, `prose` or `digits`."""
    kind, numerals = _LANGUAGES[language]
    return type("AttemptLexicon", (AttemptLexicon,), {"kind": kind, "numerals": numerals})


def main() -> None:
    """Run the command line."""
    if len(sys.argv) < 2 or sys.argv[1] not in _LANGUAGES:
        raise SystemExit(f"name a language first: {', '.join(_LANGUAGES)}")
    generate.LEXICONS["reference"] = lexicon_of(sys.argv[1])
    sys.argv[:2] = ["kvbench", "run"]
    kvbench()


if __name__ == "__main__":
    main()
