"""Generation of task rows from plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import UserError
from kvbench_tasks.synthetic.essays import essays
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, Size, Streams, fit
from kvbench_tasks.synthetic.lexicon import Lexicon, Tokens
from kvbench_tasks.synthetic.natural import NaturalLexicon
from kvbench_tasks.synthetic.reference import ReferenceLexicon

LEXICONS: dict[str, type[Lexicon]] = {
    "natural": NaturalLexicon,
    "reference": ReferenceLexicon,
}


def generate(
    task: str,
    plans: Callable[[Lexicon, int], Sequence[HaystackPlan]],
    *,
    length: int,
    samples: int,
    seed: int,
    lexicon: str,
    size: Size,
    essays_in: Path | None = None,
    **options: Any,
) -> list[Doc]:
    """Generate the first rows of a synthetic task.

    Args:
        task: The task; with lexicon, length, seed and index it seeds a row.
        plans: Returns the plans of a row from its lexicon and index, in order of preference.
        length: Maximum tokens of prompt and answer.
        samples: Number of rows.
        seed: Seed of the data.
        lexicon: "natural" or "reference".
        size: Counts a prompt's tokens.
        essays_in: Cache folder of the essays, for a natural task over them. If the hub is not reachable, the lexicon
            generates prose instead; the rows' `variant` records which was used.

    Raises:
        UserError: The lexicon is unknown, or no plan fits into `length`.
    """
    lexicon_class = LEXICONS.get(lexicon)
    if lexicon_class is None:
        raise UserError(f"unknown lexicon {lexicon!r}; there are {', '.join(LEXICONS)}")
    essay_sentences = essays(essays_in) if essays_in is not None and lexicon == "natural" else ()
    documents = []
    for sample_index in range(samples):
        streams = Streams(task, lexicon, length, seed, sample_index)
        sample_lexicon = lexicon_class(streams, length, essay_sentences or None)
        document = fit(task, plans(sample_lexicon, sample_index), length, size)
        documents.append({**document, "variant": sample_lexicon.variant} if sample_lexicon.variant else document)
    return documents


def counter(size: Size) -> Tokens:
    """Return a counter of a text's tokens, without chat template and BOS."""
    overhead = size("x", "")
    return lambda text: size(f"x {text}", "") - overhead
