"""Every synthetic leaf, in both lexicons, with word-level and byte-level ids, at 512 tokens."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.benchmark import Benchmark
from kvbench.errors import UserError
from kvbench.harness.encode import split_encode
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.reference import grammar
from kvbench_tasks.niah import BENCHMARK as NIAH
from kvbench_tasks.niah import DEPTHS
from kvbench_tasks.ruler import BENCHMARK as RULER
from kvbench_tasks.synthetic import ruler_words

from ...loading import load_task
from .oracles import facts, keys_asked, listed, solve

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LENGTH = 512
LEAVES = [leaf for leaf in (*RULER.leaves, *NIAH.leaves) if not leaf.startswith("qa_")]
LEXICONS = ("natural", "reference")


@pytest.fixture(params=["word", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"{request.param}_tokenizer")


def load(leaf: str, lexicon: str, tokenizer: Any, cache: Path, **changes: Any) -> LmEvalTask:
    bench: Benchmark = NIAH if leaf in NIAH.leaves else RULER
    settings = {
        "length": LENGTH,
        "samples": 4,
        "chat_template": tokenizer.chat_template is not None,
    }
    return load_task(leaf, bench, tokenizer, cache, lexicon=lexicon, **settings | changes)


def used(request: Any, tokenizer: Any) -> int:
    head, tail = split_encode(tokenizer, request.context, request.question)
    return len(head) + len(tail) + request.max_new_tokens


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_prompts_hold_their_answers_and_fill_their_length(
    leaf: str, lexicon: str, tokenizer: Any, tmp_path: Path
) -> None:
    task = load(leaf, lexicon, tokenizer, tmp_path)
    assert (task.metric, task.higher_is_better, task.chance) == ("string_match", True, 0.0)
    # A sample is named by its index; a depth may follow.
    assert [r.sample_id.partition("-d")[0] for r in task.requests] == ["0", "1", "2", "3"]
    assert len({r.context_id for r in task.requests}) == 4
    for request in task.requests:
        assert sorted(solve(leaf, lexicon, request.context, request.question)) == sorted(request.target)
        assert all(answer in request.context for answer in request.target)
        total = used(request, tokenizer)
        # A unit of the haystack is a word, a needle, or RULER's line of noise.
        slack = 0
        if lexicon == "natural":
            lines = request.context.splitlines()
            slack = max(len(tokenizer(line)["input_ids"]) for line in lines[-4:])
            slack = min(slack, 120) if "noise" not in leaf else slack
        elif tokenizer.chat_template is not None:
            slack = 30
        assert LENGTH - slack <= total <= LENGTH
    gold = {(r.sample_id, 0, 0): "It is " + ", ".join(r.target) for r in task.requests}
    assert task.score(gold) == (dict.fromkeys(gold, 1.0), 1.0)
    assert task.score(dict.fromkeys(gold, "I do not know."))[1] == 0.0
    assert task.score(dict.fromkeys(gold, ""))[1] == 0.0
    half = {(r.sample_id, 0, 0): r.target[0].upper() for r in task.requests}
    assert task.score(half)[1] == pytest.approx(1 / len(task.requests[0].target))


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("leaf", LEAVES)
def test_a_sample_depends_on_its_index_and_seed_alone(
    leaf: str, lexicon: str, bpe_tokenizer: Any, tmp_path: Path
) -> None:
    few = load(leaf, lexicon, bpe_tokenizer, tmp_path / "a", samples=2)
    many = load(leaf, lexicon, bpe_tokenizer, tmp_path / "b", samples=3)
    grown = load(leaf, lexicon, bpe_tokenizer, tmp_path / "a", samples=3)
    assert few.requests == many.requests[:2]
    assert grown.requests == many.requests
    assert few.data_hash == many.data_hash == grown.data_hash
    other = load(leaf, lexicon, bpe_tokenizer, tmp_path, samples=2, seed=1)
    assert other.data_hash != few.data_hash
    assert {r.context for r in other.requests}.isdisjoint(r.context for r in few.requests)


@pytest.mark.parametrize("lexicon", LEXICONS)
@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if leaf.startswith("niah")])
def test_a_key_occurs_only_where_it_is_stated(leaf: str, lexicon: str, word_tokenizer: Any, tmp_path: Path) -> None:
    for request in load(leaf, lexicon, word_tokenizer, tmp_path).requests:
        known = facts(lexicon, request.context)
        asked = keys_asked(lexicon, request.question)
        assert len(asked) == (4 if leaf == "niah_multiquery" else 1)
        crowd = {"niah_multikey_1": 4, "niah_multiquery": 4}.get(leaf, 1)
        many = leaf in ("niah_multikey_2", "niah_multikey_3")
        assert len(known) > 5 if many else len(known) == crowd
        for key in asked:
            values = 4 if leaf == "niah_multivalue" else 1
            assert request.context.count(key) == values == len(set(known[key]))
        if lexicon == "reference":
            stated = {word for key in known for word in key.split()}
            filler = re.sub(r"\bnote [^.]* \.", "", request.context).split()
            told = {word for own in known.values() for value in own for word in value.split()}
            assert stated.isdisjoint(filler)
            assert stated.isdisjoint(told)


def test_variables_are_only_in_their_statements(word_tokenizer: Any, tmp_path: Path) -> None:
    for request in load("vt", "reference", word_tokenizer, tmp_path).requests:
        counts = Counter(request.context.split())
        value, *chain = [request.question.split()[1], *request.target]
        assert len(chain) == 5
        assert counts["let"] == 5
        assert [counts[name] for name in (value, *chain)] == [1, 2, 2, 2, 2, 1]


def test_the_reference_speaks_its_own_grammar(word_tokenizer: Any, tmp_path: Path) -> None:
    known = set(grammar.VOCABULARY)
    limits = {}
    for leaf in LEAVES:
        for request in load(leaf, "reference", word_tokenizer, tmp_path).requests:
            words = (request.context + request.question).split()
            assert set(words) <= known
            assert request.until == (grammar.STOP,)
            limits[leaf] = request.max_new_tokens
    # Answers with their full stop: `a b .`, `a b , c d , e f , g h .`, `k a b , ... .` and so on.
    wanted = {"niah_single_3": 5, "niah_multikey_3": 5, "niah_multivalue": 12}
    wanted |= {"niah_multiquery": 16, "vt": 6, "cwe": 11, "fwe": 4}
    assert limits == {leaf: wanted.get(leaf, 3) for leaf in LEAVES}


def test_common_words_have_rulers_ratio(word_tokenizer: Any, tmp_path: Path) -> None:
    for lexicon, shares in (("natural", (5.9, 6.1)), ("reference", (6, 12))):
        for request in load("cwe", lexicon, word_tokenizer, tmp_path, length=2048).requests:
            body = request.context.rsplit("often.\n", 1)[-1].split("\nQuestion")[0]
            counts = Counter(listed(body) if lexicon == "natural" else body.split())
            often = [counts.pop(word) for word in request.target]
            assert len(set(often)) == 1
            low, high = shares
            assert low <= often[0] / (sum(counts.values()) / len(counts)) <= high


def test_a_worked_example_is_given_where_it_fits(bpe_tokenizer: Any, tmp_path: Path) -> None:
    for leaf, mark in (("vt", "Memorize and track"), ("cwe", "Below is a numbered")):
        for length, times in ((512, 1), (3000, 2)):
            for request in load(leaf, "natural", bpe_tokenizer, tmp_path, length=length, samples=1).requests:
                assert request.context.count(mark) == times
                assert used(request, bpe_tokenizer) <= length


def test_few_samples_spread_over_the_depths() -> None:
    assert sorted(DEPTHS) == list(range(0, 101, 10))
    assert DEPTHS[:3] == (0, 50, 100)
    for count, most in ((3, 50), (5, 30), (7, 20), (11, 10)):
        ends = sorted(DEPTHS[:count])
        assert max(b - a for a, b in pairwise(ends)) == most


def test_depths_repeat_and_are_recorded(word_tokenizer: Any, tmp_path: Path) -> None:
    for lexicon in LEXICONS:
        task = load("niah_depth", lexicon, word_tokenizer, tmp_path, samples=12, length=1024)
        for i, request in enumerate(task.requests):
            depth = DEPTHS[i % 11]
            assert request.extra == {"depth": depth}
            key = keys_asked(lexicon, request.question)[0]
            body = request.context.split("afterwards.\n")[-1]
            found = 100 * body.index(key) / len(body)
            assert abs(found - depth) < 6


def test_a_version_names_the_material_of_the_rows(bpe_tokenizer: Any, tmp_path: Path) -> None:
    def version_of(leaf: str, lexicon: str) -> str:
        return load(leaf, lexicon, bpe_tokenizer, tmp_path, samples=1).version

    words = f"wonderwords-{version('wonderwords')}"
    assert version_of("niah_single_2", "natural") == f"2+{words}+generated-prose"
    assert version_of("niah_depth", "natural") == f"3+{words}+generated-prose"
    assert version_of("niah_single_1", "natural") == f"2+{words}"
    assert version_of("cwe", "natural") == f"2+{words}"
    assert version_of("vt", "natural") == "2"
    for unchanged in ("niah_multikey_3", "fwe"):
        assert version_of(unchanged, "natural") == "1"
    assert {version_of(leaf, "reference") for leaf in RULER.leaves[:-2]} == {"1"}
    assert version_of("niah_depth", "reference") == "2"


def test_another_release_of_the_words_is_other_data(
    bpe_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(leaf: str) -> tuple[str, str]:
        task = load(leaf, "natural", bpe_tokenizer, tmp_path, samples=1)
        return task.version, task.data_hash

    leaves = ("niah_single_1", "cwe", "vt")
    before = [both(leaf) for leaf in leaves]
    monkeypatch.setattr(ruler_words, "release", lambda: "wonderwords-0")
    needle, cwe, vt = [both(leaf) for leaf in leaves]
    assert needle[0] == cwe[0] == "2+wonderwords-0"
    assert (needle[1] != before[0][1], cwe[1] != before[1][1], vt == before[2]) == (True,) * 3


@pytest.mark.parametrize("leaf", ["niah_multivalue", "cwe", "fwe"])
def test_a_length_that_is_too_short_is_a_one_line_error(leaf: str, bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^{leaf} does not fit into --length 100 .*least \d+$"):
        load(leaf, "natural", bpe_tokenizer, tmp_path, length=100)


def test_long_haystacks_do_not_run_out_of_words(word_tokenizer: Any, tmp_path: Path) -> None:
    for leaf in ("niah_multikey_2", "niah_multikey_3", "cwe", "fwe"):
        (request,) = load(leaf, "reference", word_tokenizer, tmp_path, length=8192, samples=1).requests
        assert used(request, word_tokenizer) == 8192
        assert sorted(solve(leaf, "reference", request.context, request.question)) == sorted(request.target)


def test_a_random_llama_answers(bpe_tokenizer: Any, tiny_llama: LlamaForCausalLM, tmp_path: Path) -> None:
    import torch

    task = load("vt", "natural", bpe_tokenizer, tmp_path, samples=1)
    (request,) = task.requests
    head, tail = split_encode(bpe_tokenizer, request.context, request.question)
    prompt = torch.tensor([head + tail])
    out = tiny_llama.generate(prompt, max_new_tokens=request.max_new_tokens, do_sample=False)
    assert out.shape[1] <= LENGTH
    response = bpe_tokenizer.decode(out[0, prompt.shape[1] :])
    assert 0.0 <= task.score({("0", 0, 0): response})[1] <= 1.0
