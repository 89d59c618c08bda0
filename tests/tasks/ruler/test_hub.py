"""Leaves that need the hub say so at once, and work with rows in the hub's schema."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.benchmark import Source
from kvbench.data import hub_cache
from kvbench.errors import NeedsHub
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.ruler import BENCHMARK, qa
from kvbench_tasks.synthetic.essays import essays
from kvbench_tasks.synthetic.ruler_words import release

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Columns as on the dataset cards of rajpurkar/squad_v2, hotpotqa/hotpot_qa (distractor) and
# baber/paul_graham_essays.
SQUAD = [
    {
        "id": f"{a}{p}{q}",
        "title": f"Article {a}",
        "context": f"Fact {a}.{p} is that the colour of house {a}{p} is shade{a}{p}.",
        "question": f"What is the colour of house {a}{p}?",
        "answers": {"text": [f"shade{a}{p}"] * 2, "answer_start": [9, 9]}
        if q == 0
        else {"text": [], "answer_start": []},
    }
    for a in range(20)
    for p in range(3)
    for q in range(2)
]
HOTPOT = [
    {
        "id": str(i),
        "question": f"Who built bridge {i}?",
        "answer": f"builder{i}",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {"title": [f"Bridge {i}"], "sent_id": [0]},
        "context": {
            "title": [f"Bridge {i}", f"Road {i}"],
            "sentences": [[f"Bridge {i} is long.", f" builder{i} built it."], ["A road."]],
        },
    }
    for i in range(12)
]
ESSAYS = [{"text": text} for text in ("Work is good. Is it? Yes! " * 40, "Hackers   and\n\npainters paint. " * 40)]


def load(leaf: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    settings = {"length": 512, "samples": 6, "chat_template": True}
    return load_task(leaf, BENCHMARK, tokenizer, cache, **settings | changes)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has the rows above; gives the list of what was fetched."""
    fetched: list[str] = []
    content = {
        "rajpurkar/squad_v2": SQUAD,
        "hotpotqa/hotpot_qa": HOTPOT,
        "baber/paul_graham_essays": ESSAYS,
    }

    def download(source: Source, *, force: bool) -> str:
        fetched.append(source.dataset)
        return "c0ffee"

    monkeypatch.setattr("kvbench.data.hub.unreachable", lambda: "")
    monkeypatch.setattr(hub_cache, "download", download)
    monkeypatch.setattr(hub_cache, "read", lambda source, commit: iter(content[source.dataset]))
    for kept in (essays, qa._squad, qa._hotpot):
        kept.cache_clear()
    return fetched


@pytest.mark.parametrize("leaf", ["qa_1", "qa_2"])
def test_without_the_hub_the_error_is_immediate(
    leaf: str, bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert leaf in BENCHMARK.hub_leaves
    start = time.perf_counter()
    with pytest.raises(
        NeedsHub,
        match=rf"^needs the dataset \S+ from the Hugging Face hub, .*`kvbench data fetch {leaf}`",
    ):
        load(leaf, bpe_tokenizer, tmp_path)
    assert time.perf_counter() - start < 3
    with pytest.raises(NeedsHub, match="which the reference model cannot read"):
        load(leaf, bpe_tokenizer, tmp_path, lexicon="reference")


@pytest.mark.parametrize("leaf", ["qa_1", "qa_2"])
def test_questions_follow_their_documents(
    leaf: str,
    online: list[str],
    bpe_tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = load(leaf, bpe_tokenizer, tmp_path)
    for request in task.requests:
        number = re.search(r"(?:house|bridge) (\d+)\?", request.question)
        assert number is not None
        word = "shade" if leaf == "qa_1" else "builder"
        assert request.target == (f"{word}{number[1]}",)
        assert request.target[0] in request.context
        marks = [int(n) for n in re.findall(r"Document (\d+):\n", request.context)]
        assert marks == list(range(1, len(marks) + 1))
        assert len(marks) > 5
        assert request.question.startswith("Answer the question based on the given documents.")
        assert request.question.endswith("Answer:")
    if leaf == "qa_1":  # the article's other paragraphs come before any other's
        for request in task.requests:
            article = re.search(r"house (\d+)\d\?", request.question)
            assert article is not None
            for p in range(3):
                assert f"Fact {article[1]}.{p} " in request.context
    first = {(r.sample_id, 0, 0): r.target[0] for r in task.requests}
    assert task.score(first)[1] == 1.0
    assert load(leaf, bpe_tokenizer, tmp_path, samples=9).requests[:6] == task.requests
    # From now on it works without the hub.
    monkeypatch.setattr("kvbench.data.hub.unreachable", lambda: "away")
    qa._squad.cache_clear()
    qa._hotpot.cache_clear()
    assert load(leaf, bpe_tokenizer, tmp_path).requests == task.requests
    assert len(online) == 1


def test_any_of_the_answers_counts_for_qa() -> None:
    from kvbench_tasks.ruler.metric import string_match_all, string_match_part

    doc = {"outputs": ["one", "two", "three"]}
    assert string_match_part(doc, ["it is TWO\x07 "]) == {"string_match": 1.0}
    assert string_match_part(doc, ["four"]) == {"string_match": 0.0}
    assert string_match_all(doc, ["it is TWO"]) == {"string_match": pytest.approx(1 / 3)}


def test_essays_come_from_the_hub_when_it_is_there(
    online: list[str], bpe_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    task = load("niah_single_2", bpe_tokenizer, tmp_path, samples=2)
    assert task.version == f"2+{release()}+essays"
    assert all("Work is good. Is it? Yes!" in r.context for r in task.requests)
    again = load("niah_single_2", bpe_tokenizer, tmp_path, samples=2)
    assert (again.requests, online) == (task.requests, ["baber/paul_graham_essays"])
    essays.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.data.hub.unreachable", lambda: "away")
        prose = load("niah_single_2", bpe_tokenizer, tmp_path / "new", samples=2)
    essays.cache_clear()
    assert prose.version == f"2+{release()}+generated-prose"
    assert prose.data_hash != task.data_hash
