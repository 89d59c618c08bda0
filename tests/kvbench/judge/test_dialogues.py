"""Live dialogues whose answers a judge rates: it sees the model's own history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvbench
from kvbench.data.sources import keep
from kvbench.errors import UserError
from kvbench_tasks.mt_bench import SOURCE

from .server import Reply, Server

QUESTIONS: list[dict[str, Any]] = [
    {"category": "writing", "prompt": ["Write about rain.", "Now in one line."], "reference": []},
    {"category": "math", "prompt": ["What is 2 + 3?", "Double it."], "reference": ["5", "10"]},
    {"category": "math", "prompt": ["What is 9 - 2?", "Halve it."], "reference": ["7", "3.5"]},
]


def test_a_live_run_is_judged_with_the_answers_of_its_own_history(
    llama_folder: str,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVBENCH_CACHE", str(tmp_path / "cache"))
    keep(SOURCE, QUESTIONS, tmp_path / "cache")
    monkeypatch.setenv("KVBENCH_JUDGE_URL", server.url)
    monkeypatch.setenv("KVBENCH_JUDGE_MODEL", "judge-1")
    for name in ("KVBENCH_JUDGE", "KVBENCH_JUDGE_KEY"):
        monkeypatch.delenv(name, raising=False)

    def answer(body: dict[str, Any], count: int) -> Reply:
        prompt = body["messages"][-1]["content"]
        if count == 0:  # the check before anything is generated
            return Reply("yes")
        return Reply(f"Rating: [[{9 if 'Conversation' in prompt else 4}]]")

    server.answer = answer
    settings = {
        "model": llama_folder,
        "policy": "streaming_llm:sinks=2,random",
        "budget": 8,
        "max_new_tokens": 6,
        "task": "mt_bench_math,mt_bench_stream",
        "samples": 2,
    }
    run = kvbench.run({**settings, "moment": "turns", "out": str(tmp_path / "run")})
    assert (run.cells.status == "ok").all()
    assert set(run.cells.metric) == {"rating (judge judge-1)"}
    assert run.cells.score.tolist() == pytest.approx([0.65] * len(run.cells))
    samples = run.samples
    turns = [json.loads(extra)["turn"] for extra in samples.extra]
    assert samples.score.tolist() == pytest.approx([0.9 if turn else 0.4 for turn in turns])
    prompts = [body["messages"][-1]["content"] for body in server.bodies]
    chosen = samples[samples.task == "mt_bench_math"]
    for _, dialogue in chosen.groupby(["policy", "sample_id"]):
        first, second = (text.strip() for text in dialogue.sort_values("question_id").response)
        said = f"### Assistant A:\n{first}\n\n### User:\n"
        assert any(said in prompt and f"### Assistant A:\n{second}\n\n<|" in prompt for prompt in prompts)
    systems = [body["messages"][0]["content"] for body in server.bodies if len(body["messages"]) == 2]
    assert len(systems) == len(server.bodies) - 1, "only the check of the judge has no system message"
    with pytest.raises(UserError, match=r"mt_bench_math has no reference answers .*; use --moment turns alone"):
        kvbench.run({**settings, "moment": "context,turns", "out": str(tmp_path / "other")})
