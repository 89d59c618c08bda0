"""Flags on answers, from the command line to the tables: a random Llama that may think."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.cli import call
from kvbench.decoding import Thinking
from kvbench.engine.decode import DecodeRow, Stop
from kvbench.harness import catalogue
from kvbench.harness.chat import chat
from kvbench.runs.file_names import RESPONSES
from kvbench.runs.store import RunStore
from kvbench_tasks.synthetic.words import prose

# As Qwen3's template: what it is told as `enable_thinking` closes the thinking at once, or not.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
DRAWN = ["--temperature", "1.5", "--top-p", "0.95", "--top-k", "50"]


@pytest.fixture(scope="module")
def tokenizer(bpe_tokenizer: Any) -> Any:
    made = copy.deepcopy(bpe_tokenizer)
    made.add_tokens(["<think>", "</think>"])
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    made = str(tmp_path_factory.mktemp("models") / "thinker")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVBENCH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two contexts of about 150 tokens, two questions each."""
    rng = random.Random(0)
    rows = []
    for _ in range(2):
        context = ". ".join(" ".join(w) for w in islice(prose(rng), 12))
        for question in (" What is green?", " Who has read the letter?"):
            row = {"context": context, "question": question, "answers": "x", "max_new_tokens": 4}
            rows.append(json.dumps(row))
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    path.write_text("\n".join(rows))
    return str(path)


def run(folder: str, own: str, out: Path, *flags: str) -> int:
    usual = ["--policy", "snapkv:window=8:buffer=2", "--budget", "24", "--model", folder]
    return call(["run", *usual, "--task", own, "--samples", "4", "--out", str(out), *flags])


def texts(path: Path) -> dict[Any, str]:
    with RunStore(path) as store:
        return {r.key: r.response for r in store.responses()}


MOMENTS = ["--moment", "context,decode,chunked:64"]


@pytest.fixture(scope="module")
def drawn(folder: str, own: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "drawn"
    assert run(folder, own, out, *MOMENTS, *DRAWN, "--repeats", "3") == 0
    return out


def test_every_repeat_is_a_response_of_its_own(drawn: Path) -> None:
    cells, samples = kvbench.load(drawn)
    assert len(cells) == 1 + 3
    assert (cells.samples == 2).all() and (cells.status == "ok").all()
    assert len(samples) == 4 * 4 * 3
    keys = ["cell", "sample_id", "question_id", "repeat"]
    assert not samples.duplicated(keys).any()
    assert set(samples.repeat) == {0, 1, 2}
    asked = samples.groupby(["cell", "sample_id", "question_id"]).response.nunique()
    assert (asked > 1).mean() > 0.9
    for row in cells.itertuples():
        mine = samples[samples.cell == row.cell]
        assert row.score == pytest.approx(mine.score.mean())
        recorded = json.loads(row.versions)["generation"]
        assert recorded == {
            "temperature": 1.5,
            "top_p": 0.95,
            "top_k": 50,
            "think_end": "</think>",
            "repeats": 3,
        }


@pytest.mark.slow
def test_drawn_responses_do_not_depend_on_the_batch_or_on_interruptions(
    drawn: Path, folder: str, own: str, tmp_path: Path
) -> None:
    want = texts(drawn)
    assert run(folder, own, tmp_path / "one", *MOMENTS, *DRAWN, "--repeats", "3", "--batch-size", "1") == 0
    assert texts(tmp_path / "one") == want
    # Half way: fewer repeats first, and of those every third response lost.
    out = tmp_path / "half"
    assert run(folder, own, out, *MOMENTS, *DRAWN, "--repeats", "2") == 0
    file = out / RESPONSES
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4 * 4 * 2
    file.write_bytes(b"".join(line for i, line in enumerate(lines) if i % 3))
    assert run(folder, own, out, *MOMENTS, *DRAWN, "--repeats", "3") == 0
    assert texts(out) == want
    for fewer in (["--repeats", "1"], []):  # the task's own number is 1
        assert run(folder, own, out, *MOMENTS, *DRAWN, *fewer) == 0
        assert len(kvbench.load(out)[1]) == 4 * 4 * 3, "the folder keeps its results"
    assert texts(out) == want


def test_all_cells_draw_with_the_same_noise(folder: str, own: str, tmp_path: Path) -> None:
    # At a budget beyond all tokens nothing is evicted: what is left is the noise.
    flags = ["--policy", "knorm", "--budget", "500", "--moment", "question", "--repeats", "2"]
    assert run(folder, own, tmp_path / "a", *flags, *DRAWN) == 0
    _, samples = kvbench.load(tmp_path / "a")
    said: dict[str, dict[Any, str]] = {}
    for row in samples[samples.budget.isin(["full", "500"])].itertuples():
        key = (row.sample_id, row.question_id, row.repeat)
        said.setdefault(f"{row.policy} {row.budget}", {})[key] = row.response
    assert len(said) == 3 and len(said["full full"]) == 8
    assert said["knorm 500"] == said["full full"]
    assert run(folder, own, tmp_path / "b", *flags, *DRAWN, "--seed", "1", "--no-full") == 0
    other = {key[1:]: text for key, text in texts(tmp_path / "b").items()}
    assert sum(other[key] != text for key, text in said["full full"].items()) > 4


def test_live_dialogues_are_drawn_apart(folder: str, tmp_path: Path) -> None:
    flags = ["--task", "dialogue", "--length", "400", "--samples", "1", "--moment", "turns"]
    flags += [*DRAWN, "--repeats", "3", "--max-new-tokens", "3"]
    assert run(folder, "dialogue", tmp_path / "many", *flags) == 0
    assert run(folder, "dialogue", tmp_path / "one", *flags, "--batch-size", "1") == 0
    want = texts(tmp_path / "many")
    assert texts(tmp_path / "one") == want
    assert {key[3] for key in want} == {0, 1, 2}
    firsts = {text for key, text in want.items() if key[1] == "0" and key[2] == 0}
    assert len(firsts) > 1
    # One repeat of one dialogue is lost: it is held again, the others are not.
    file = tmp_path / "many" / RESPONSES
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"repeat":1' not in line))
    assert run(folder, "dialogue", tmp_path / "many", *flags) == 0
    assert texts(tmp_path / "many") == want


def test_repeats_of_a_live_dialogue_go_through_all_its_turns(folder: str, tmp_path: Path) -> None:
    flags = ["--length", "300", "--samples", "1", "--moment", "turns", "--max-new-tokens", "3"]
    assert run(folder, "dialogue", tmp_path / "greedy", *flags) == 0
    cold = ["--temperature", "0.0001", "--repeats", "2"]
    assert run(folder, "dialogue", tmp_path / "cold", *flags, *cold) == 0
    _, one = kvbench.load(tmp_path / "greedy")
    _, many = kvbench.load(tmp_path / "cold")
    assert set(one.question_id) >= {0, 1}
    want = {(r.policy, r.question_id): r.response for r in one.itertuples()}
    assert len(many) == 2 * len(one)
    assert all(want[r.policy, r.question_id] == r.response for r in many.itertuples())


def test_greedy_runs_are_what_they_were(folder: str, own: str, tmp_path: Path, capsys: Any) -> None:
    assert run(folder, own, tmp_path / "a", "--repeats", "4") == 0
    assert "own is answered greedily, so its 4 repeats would be the same" in capsys.readouterr().err
    assert run(folder, own, tmp_path / "b", "--temperature", "0") == 0
    assert run(folder, own, tmp_path / "c") == 0
    assert texts(tmp_path / "a") == texts(tmp_path / "b") == texts(tmp_path / "c")
    assert {key[3] for key in texts(tmp_path / "a")} == {0}


def test_limits_and_thinking_change_the_cell(folder: str, own: str, tmp_path: Path) -> None:
    names = set()
    for i, flags in enumerate(([], ["--max-new-tokens", "3"], ["--thinking"], ["--no-thinking"])):
        assert run(folder, own, tmp_path / str(i), *flags, "--no-full") == 0
        cells, samples = kvbench.load(tmp_path / str(i))
        names |= set(cells.cell) | set(cells.match)
        assert samples.generated_tokens.max() <= (3 if i == 1 else 4)
    assert len(names) == 8
    _, plain = kvbench.load(tmp_path / "2")
    _, closed = kvbench.load(tmp_path / "3")
    # "<think>\n\n</think>\n\n" goes with the question.
    assert (closed.question_tokens > plain.question_tokens).all()
    assert (closed.context_tokens == plain.context_tokens).all()


def test_thinking_is_nothing_to_a_task_that_is_given_no_template(
    folder: str, own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = catalogue.resolve_task

    def plain(name: str, *_: Any) -> Any:
        return [(leaf, replace(of, plain=frozenset({leaf}))) for leaf, of in find(name)]

    monkeypatch.setattr(catalogue, "resolve_task", plain)
    names = []
    for i, flags in enumerate(([], ["--thinking"])):
        assert run(folder, own, tmp_path / str(i), *flags, "--no-full") == 0
        cells, _ = kvbench.load(tmp_path / str(i))
        names.append(set(cells.cell))
    assert names[0] == names[1]


def test_the_template_is_told(tokenizer: Any) -> None:
    asked = [{"role": "user", "content": "?"}]
    assert chat(tokenizer, "m", asked, thinking=False).endswith("<think>\n\n</think>\n\n")
    assert chat(tokenizer, "m", asked, thinking=True) == chat(tokenizer, "m", asked)


def test_a_template_without_a_switch_is_refused(llama_folder: str, own: str, tmp_path: Path, capsys: Any) -> None:
    assert run(llama_folder, own, tmp_path, "--thinking") == 2
    assert "ignores enable_thinking" in capsys.readouterr().err
    assert run(llama_folder, own, tmp_path, "--thinking", "--no-chat-template") == 2
    assert "but none is applied" in capsys.readouterr().err


def test_stop_strings_do_not_end_thinking(tokenizer: Any) -> None:
    def pushed(text: str, opened: bool = False, until: str = ".") -> DecodeRow:
        stop = Stop(tokenizer, [], [until], Thinking.of(tokenizer), opened)
        row = DecodeRow(99, stop)
        for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
            row.push(token)
        return row

    row = pushed("<think>a. b.</think> the green. door")
    assert (row.reason, row.text()) == ("stop", "<think>a. b.</think> the green")
    row = pushed("<think>a. b. c")
    assert (row.reason, row.text()) == ("", "<think>a. b. c")
    row = pushed("a. b.</think> the green. door", opened=True)
    assert (row.reason, row.text()) == ("stop", "a. b.</think> the green")
    row = pushed("<think>a\n\nb</think>\n\nthe green\n\nmore", until="\n\n")
    assert (row.reason, row.text()) == ("stop", "<think>a\n\nb</think>\n\nthe green")
    row = pushed("the green. door")
    assert (row.reason, row.text()) == ("stop", "the green")


def test_contexts_are_cut_in_the_middle_only_where_asked(folder: str, own: str, tmp_path: Path, capsys: Any) -> None:
    rows = [json.loads(line) for line in Path(own).read_text().splitlines()]
    long = tmp_path / "long.jsonl"
    rows[0]["context"] = rows[0]["context"] * 8
    long.write_text("\n".join(json.dumps(row) for row in rows[:3]))
    assert run(folder, str(long), tmp_path / "a") == 2
    error = capsys.readouterr().err
    assert "do not fit into the 512" in error and "use --truncate middle" in error
    assert run(folder, str(long), tmp_path / "a", "--truncate", "middle") == 0
    assert "long: 1 of 3 contexts were truncated in the middle" in capsys.readouterr().err
    cells, samples = kvbench.load(tmp_path / "a")
    recorded = [json.loads(v)["generation"] for v in cells.versions]
    assert all(r["truncate"] == "middle" and r["truncated"] == 1 for r in recorded)
    first = samples[samples.sample_id == "0"]
    assert (first.context_tokens + first.question_tokens + 4 == 512).all()
    assert run(folder, str(long), tmp_path / "b", "--truncate", "middle:100") == 0
    _, samples = kvbench.load(tmp_path / "b")
    assert (samples.context_tokens + samples.question_tokens + 4 == 100).all()
    assert run(folder, str(long), tmp_path / "c", "--truncate", "middle:10") == 2
    assert "question and answer alone have" in capsys.readouterr().err
    turns = ["--moment", "turns", "--length", "400", "--samples", "1", "--truncate", "middle:200"]
    assert run(folder, "dialogue", tmp_path / "d", *turns) == 2
    assert "a live dialogue is never truncated" in capsys.readouterr().err
    assert run(folder, "vt", tmp_path / "d", "--length", "1024", "--truncate", "middle") == 2
    assert "use a smaller --length" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature must be a number from 0 (greedy) to 100, not -1.0"),
        (["--top-p", "1.5"], "top_p must be a number above 0 and at most 1, not 1.5"),
        (["--top-k", "0"], "top_k must be an integer from 1"),
        (["--repeats", "0"], "repeats must be an integer from 1"),
        (["--truncate", "left"], "unknown truncation 'left'"),
        (["--top-p", "0.9"], "own is answered greedily; --top-p and --top-k need a --temperature"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(
    folder: str, own: str, tmp_path: Path, capsys: Any, flags: list[str], message: str
) -> None:
    assert run(folder, own, tmp_path / "x", *flags) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
