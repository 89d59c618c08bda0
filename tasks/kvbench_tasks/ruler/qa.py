"""RULER's qa_1 (SQuAD) and qa_2 (HotpotQA): the documents with the answer among others."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kvbench.benchmark import Source
from kvbench.data.sources import rows
from kvbench.errors import NeedsHub
from kvbench_tasks.synthetic.fitting import Doc, Plan, Size, Streams, fit
from kvbench_tasks.synthetic.natural import framed, prompts

SQUAD = Source(
    "rajpurkar/squad_v2",
    split="validation",
    columns=("title", "context", "question", "answers"),
)
HOTPOT = Source(
    "hotpotqa/hotpot_qa",
    "distractor",
    "validation",
    columns=("question", "answer", "context"),
)


def qa_rows(
    leaf: str,
    *,
    length: int,
    samples: int,
    seed: int,
    lexicon: str,
    cache_dir: Path,
    size: Size,
    **_: Any,
) -> list[Doc]:
    """Make the rows of a task; see `Benchmark.docs`. The seed orders the questions."""
    if lexicon != "natural":
        raise NeedsHub("asks about English documents, which the reference model cannot read")
    questions, documents = _squad(cache_dir) if leaf == "qa_1" else _hotpot(cache_dir)
    order = Streams(leaf, seed)["questions"].sample(range(len(questions)), len(questions))
    made = []
    for i in range(samples):
        question = questions[order[i % len(order)]]
        streams = Streams(leaf, length, seed, i)
        made.append(fit(leaf, [_plan(question, documents, streams)], length, size))
    return made


def _plan(question: dict[str, Any], documents: list[str], streams: Streams) -> Plan:
    """Use the question's own documents first, then others of its article, then any."""
    own, more = question["own"], question["more"]
    named = {*own, *more}
    more = streams["more"].sample(more, len(more))
    others = streams["others"]
    count = len(documents)

    @functools.cache
    def rest() -> list[int]:
        return [i for i in others.sample(range(count), count) if i not in named]

    def build(n: int) -> Doc:
        chosen = [*own, *more, *(rest() if n > len(own) + len(more) else [])][:n]
        streams.fresh("order").shuffle(chosen)
        texts = [
            prompts()["qa"]["document"].format(i=i, document=documents[d])
            for i, d in enumerate(chosen, 1)
        ]
        template = prompts()["qa"]["template"]
        body = "\n\n".join(texts)
        return framed("qa", template, body, question["outputs"], query=question["query"])

    return Plan(build, least=len(own), most=count)


Data = tuple[list[dict[str, Any]], list[str]]


@functools.lru_cache(maxsize=2)
def _squad(cache_dir: Path) -> Data:
    found = rows(SQUAD, cache_dir)
    documents = sorted({row["context"] for row in found})
    number = {text: i for i, text in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for row in found:
        articles.setdefault(row["title"], {})[number[row["context"]]] = None
    questions = []
    for row in found:
        if row["answers"]["text"]:  # the others cannot be answered
            own = number[row["context"]]
            questions.append(
                {
                    "query": row["question"],
                    "outputs": list(dict.fromkeys(row["answers"]["text"])),
                    "own": [own],
                    "more": [i for i in articles[row["title"]] if i != own],
                }
            )
    return questions, documents


@functools.lru_cache(maxsize=2)
def _hotpot(cache_dir: Path) -> Data:
    found = [
        {
            "question": row["question"],
            "answer": row["answer"],
            "documents": [
                f"{title}\n{''.join(sentences)}"
                for title, sentences in zip(
                    row["context"]["title"], row["context"]["sentences"], strict=True
                )
            ],
        }
        for row in rows(HOTPOT, cache_dir)
    ]
    documents = sorted({text for row in found for text in row["documents"]})
    number = {text: i for i, text in enumerate(documents)}
    questions = [
        {
            "query": row["question"],
            "outputs": [row["answer"]],
            "own": list(dict.fromkeys(number[text] for text in row["documents"])),
            "more": [],
        }
        for row in found
    ]
    return questions, documents
