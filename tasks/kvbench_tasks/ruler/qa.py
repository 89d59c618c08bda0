"""RULER's qa_1 (SQuAD) and qa_2 (HotpotQA): documents with the answer among distractors."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from kvbench.benchmark import Source
from kvbench.data.sources import rows
from kvbench.errors import NeedsHub
from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, Size, Streams, fit
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
    task: str,
    *,
    length: int,
    samples: int,
    seed: int,
    lexicon: str,
    cache_dir: Path,
    size: Size,
    **options: Any,
) -> list[Doc]:
    """Return the rows of a task; see `Benchmark.docs`. The seed orders the questions."""
    if lexicon != "natural":
        raise NeedsHub("asks about English documents, which the reference model cannot read")
    questions, documents = _squad(cache_dir) if task == "qa_1" else _hotpot(cache_dir)
    question_order = Streams(task, seed)["questions"].sample(range(len(questions)), len(questions))
    question_docs = []
    for sample_index in range(samples):
        question = questions[question_order[sample_index % len(question_order)]]
        streams = Streams(task, length, seed, sample_index)
        question_docs.append(fit(task, [_plan(question, documents, streams)], length, size))
    return question_docs


def _plan(question: dict[str, Any], documents: list[str], streams: Streams) -> HaystackPlan:
    """Use the question's documents first, then others of its article, then any."""
    own_documents, article_documents = question["own"], question["more"]
    excluded = {*own_documents, *article_documents}
    article_documents = streams["more"].sample(article_documents, len(article_documents))
    other_generator = streams["others"]
    total_documents = len(documents)

    @functools.cache
    def rest() -> list[int]:
        return [
            document_index
            for document_index in other_generator.sample(range(total_documents), total_documents)
            if document_index not in excluded
        ]

    def build(document_count: int) -> Doc:
        selected = [
            *own_documents,
            *article_documents,
            *(rest() if document_count > len(own_documents) + len(article_documents) else []),
        ][:document_count]
        streams.fresh("order").shuffle(selected)
        document_texts = [
            prompts()["qa"]["document"].format(i=number, document=documents[document_index])
            for number, document_index in enumerate(selected, 1)
        ]
        template = prompts()["qa"]["template"]
        context = "\n\n".join(document_texts)
        return framed("qa", template, context, question["outputs"], query=question["query"])

    return HaystackPlan(build, min_units=len(own_documents), max_units=total_documents)


Data = tuple[list[dict[str, Any]], list[str]]


@functools.lru_cache(maxsize=2)
def _squad(cache_dir: Path) -> Data:
    records = rows(SQUAD, cache_dir)
    documents = sorted({record["context"] for record in records})
    indices = {document: document_index for document_index, document in enumerate(documents)}
    articles: dict[str, dict[int, None]] = {}
    for record in records:
        articles.setdefault(record["title"], {})[indices[record["context"]]] = None
    questions = []
    for record in records:
        if record["answers"]["text"]:  # the others cannot be answered
            own_index = indices[record["context"]]
            questions.append(
                {
                    "query": record["question"],
                    "outputs": list(dict.fromkeys(record["answers"]["text"])),
                    "own": [own_index],
                    "more": [
                        document_index for document_index in articles[record["title"]] if document_index != own_index
                    ],
                }
            )
    return questions, documents


@functools.lru_cache(maxsize=2)
def _hotpot(cache_dir: Path) -> Data:
    records = [
        {
            "question": record["question"],
            "answer": record["answer"],
            "documents": [
                f"{title}\n{''.join(sentences)}"
                for title, sentences in zip(record["context"]["title"], record["context"]["sentences"], strict=True)
            ],
        }
        for record in rows(HOTPOT, cache_dir)
    ]
    documents = sorted({document for record in records for document in record["documents"]})
    indices = {document: document_index for document_index, document in enumerate(documents)}
    questions = [
        {
            "query": record["question"],
            "outputs": [record["answer"]],
            "own": list(dict.fromkeys(indices[document] for document in record["documents"])),
            "more": [],
        }
        for record in records
    ]
    return questions, documents
