"""Every set loads from rows in the dataset's schema and has LongBench's prompts."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.data.sources import keep
from kvbench.errors import LeftOut, NeedsHub
from kvbench.harness.lm_eval import LmEvalTask
from kvbench_tasks.longbench import BENCHMARK, DOMAINS, SETS, source

from ...loading import load_task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FIXTURES = Path(__file__).parent / "fixtures"

# Where lm-eval's prompts leave out what LongBench's config/dataset2prompt.json has.
OFFICIAL = {
    "triviaqa": ("{context}\n{input}", "{context}\n\n{input}"),
    "samsum": ("{context}\n{input}", "{context}\n\n{input}"),
    "passage_count": ("The final answer is:", "The final answer is: "),
    "passage_retrieval_en": ("The answer is:", "The answer is: "),
    "lcc": ("Next line of code:", "Next line of code:\n"),
    "repobench-p": ("Next line of code:", "Next line of code:\n"),
}

# As LongBench's config/dataset2maxlen.json has them, in the order of `SETS`.
LIMITS = [128, 128, 64, 32, 32, 32, 512, 512, 512, 64, 32, 128, 32, 32, 64, 64]


def raw(name: str) -> list[dict[str, Any]]:
    lines = (FIXTURES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    for name in SETS:
        keep(source(name), raw(name), folder)
    return folder


def load(name: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    return load_task(f"longbench_{name}", BENCHMARK, tokenizer, cache, **{"length": 512} | changes)


def template(name: str) -> str:
    """The official prompt: lm-eval's, with what it leaves out."""
    text = (files("lm_eval") / "tasks" / "longbench" / f"{name}.yaml").read_text()
    found = re.search(r'^doc_to_text: (".*")$', text, re.MULTILINE)
    assert found is not None
    prompt = str(json.loads(found[1]))
    prompt = prompt.replace("{{context}}", "{context}").replace("{{question}}", "{input}")
    if name in OFFICIAL:
        theirs, official = OFFICIAL[name]
        assert prompt.endswith(theirs)
        prompt = prompt.removesuffix(theirs) + official
    return prompt


def test_the_table_of_the_paper() -> None:
    assert len(BENCHMARK.leaves) == 16
    assert [len(sets) for sets in DOMAINS.values()] == [3, 3, 3, 3, 2, 2]
    assert set(BENCHMARK.sources) == set(BENCHMARK.leaves) == BENCHMARK.hub_leaves


@pytest.mark.parametrize("name", SETS)
def test_prompts_are_the_official_ones(name: str, cache: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    task = load(name, bpe_tokenizer, cache)
    assert (task.length, task.metric, task.higher_is_better, task.chance) == (0, "score", True, 0)
    rows = raw(name)
    assert len(task.requests) == len(rows) == 2
    for request, row in zip(task.requests, rows, strict=True):
        prompt = template(name).format(context=row["context"], input=row["input"])
        assert request.context + request.question == prompt
        assert row["context"] in request.context
        assert row["input"] in request.question
        assert request.target == tuple(row["answers"])
        assert request.max_new_tokens == LIMITS[SETS.index(name)]
        assert request.until == ()
        domain = next(domain for domain, sets in DOMAINS.items() if name in sets)
        assert request.extra == {"domain": domain, "words": row["length"], "id": row["_id"]}
    right = {(r.sample_id, r.question_id, 0): r.target[-1] for r in task.requests}
    scores, mean = task.score(right)
    assert mean == pytest.approx(1.0, abs=1e-7)
    assert task.score(dict.fromkeys(right, ""))[1] == 0.0
    assert len(scores) == 2


def test_the_readme_shows_a_raw_row_and_every_set() -> None:
    page = (BENCHMARK.yaml / "README.md").read_text()
    (shown,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    assert json.loads(shown) == raw("hotpotqa")[0]
    table = re.findall(r"^\| (longbench_\S+) \| (\w+) \| .* \| (\d+) \| ", page, re.MULTILINE)
    domains = [domain for domain, sets in DOMAINS.items() for _ in sets]
    limits = map(str, LIMITS)
    assert table == list(zip(BENCHMARK.leaves, domains, limits, strict=True))


def test_only_the_question_is_left_out_of_the_context(cache: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    (request, _) = load("hotpotqa", bpe_tokenizer, cache).requests
    assert request.context.endswith("do not output any other words.\n\n")
    assert request.question.startswith("Question: What is the capital")
    assert request.question.endswith("\nAnswer:")
    (request, _) = load("gov_report", bpe_tokenizer, cache).requests
    assert request.question == "Now, write a one-page summary of the report.\n\nSummary:"
    (request, _) = load("repobench-p", bpe_tokenizer, cache).requests
    assert request.question.startswith("from shelf import Shelf\n")


@pytest.mark.parametrize("name", SETS)
def test_examples_and_code_get_no_chat_template(name: str, cache: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    bare = load(name, bpe_tokenizer, cache).requests[0]
    chat = load(name, bpe_tokenizer, cache, chat_template=True).requests[0]
    if name in ("trec", "triviaqa", "samsum", "lcc", "repobench-p"):
        assert chat == bare
    else:
        assert chat.context.startswith("<|bos|><|im_start|>user\n")
        assert chat.question.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert bare.context in chat.context


def test_without_the_hub_it_is_left_out(tmp_path: Path, bpe_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(NeedsHub, match=r"needs the dataset zai-org/LongBench .*fetch longbench_t"):
        load("trec", bpe_tokenizer, tmp_path)
    with pytest.raises(LeftOut, match="the reference model knows only its own 900 words"):
        load("trec", bpe_tokenizer, tmp_path, lexicon="reference")
