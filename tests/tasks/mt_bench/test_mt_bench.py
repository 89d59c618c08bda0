"""MT-Bench: prompts, the judge's questions and ratings, and a live run, from invented questions in the hub's schema."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.data.sources import keep
from kvbench.decoding import Sampling
from kvbench.errors import NeedsHub, UserError
from kvbench.harness.lm_eval import LmEvalTask
from kvbench.judge.rubrics import rubric
from kvbench_tasks.mt_bench import BENCHMARK, SOURCE, STREAM
from kvbench_tasks.mt_bench.questions import CATEGORIES

from ...loading import load_task

QUESTIONS: list[dict[str, Any]] = [
    {"category": "writing", "prompt": ["Write about {answer} and rain.", "Now in one line."], "reference": []},
    {"category": "math", "prompt": ["What is 2 + 3?", "Double it."], "reference": ["5", "10"]},
    {"category": "coding", "prompt": ["Print 1.", "Explain it."], "reference": ["print(1)", ""]},
    {"category": "stem", "prompt": ["What is ice?", "And steam?"], "reference": None},
    {"category": "math", "prompt": ["What is 9 - 1?", "Halve it."], "reference": ["8", "4"]},
]
RULES = (
    "After providing your explanation, you must rate the response on a scale of 1 to 10 by strictly following this "
    'format: "[[rating]]", for example: "Rating: [[5]]".'
)
GENERAL = (
    "Your evaluation should consider factors such as the helpfulness, relevance, accuracy, depth, creativity, and "
    "level of detail of the response."
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    keep(SOURCE, QUESTIONS, folder)
    return folder


def load(leaf: str, tokenizer: Any, cache: Path, chat: bool = False) -> LmEvalTask:
    bench = STREAM if leaf == "mt_bench_stream" else BENCHMARK
    return load_task(leaf, bench, tokenizer, cache, chat_template=chat)


def responses(task: LmEvalTask, *texts: str) -> dict[tuple[str, int, int], str]:
    return {(r.sample_id, r.question_id, 0): text for r, text in zip(task.requests, texts, strict=True)}


def test_a_turn_is_its_message_alone(bpe_tokenizer: Any, cache: Path) -> None:
    first, second, *_ = load("mt_bench_math", bpe_tokenizer, cache, chat=True).requests
    assert (
        first.context + first.question == "<|bos|><|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.context.endswith("What is 2 + 3?")
    assert first.answer_end + second.delta + second.question == (
        "<|im_end|>\n<|im_start|>user\nDouble it.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (first.target, second.target, first.extra) == (("5",), ("10",), {"category": "math", "turn": 0})
    first, second, *_ = load("mt_bench_math", bpe_tokenizer, cache).requests
    assert first.context + first.question == "USER: What is 2 + 3?\n\nASSISTANT: "
    assert first.answer_end + second.delta + second.question == "\n\nUSER: Double it.\n\nASSISTANT: "


def test_every_category_has_the_temperature_of_fastchat(bpe_tokenizer: Any, tmp_path: Path) -> None:
    keep(SOURCE, [{**QUESTIONS[0], "category": category} for category in CATEGORIES], tmp_path)
    temperatures = {}
    for category, leaf in zip(CATEGORIES, BENCHMARK.leaves, strict=True):
        requests = load(leaf, bpe_tokenizer, tmp_path).requests
        assert {(r.max_new_tokens, r.until, r.repeats) for r in requests} == {(1024, (), 1)}
        assert [r.extra for r in requests] == [{"category": category, "turn": turn} for turn in (0, 1)]
        (temperatures[category],) = {r.sampling.temperature if r.sampling else 0 for r in requests}
        assert not requests[0].sampling or requests[0].sampling == Sampling(temperatures[category])
    cool = dict.fromkeys(("extraction", "math", "coding", "reasoning"), 0)
    assert temperatures == cool | {"writing": 0.7, "roleplay": 0.7, "stem": 0.1, "humanities": 0.1}


def test_the_stream_is_one_dialogue_of_all_questions(bpe_tokenizer: Any, cache: Path) -> None:
    requests = load("mt_bench_stream", bpe_tokenizer, cache).requests
    assert {(r.dialogue, r.max_new_tokens, r.sampling) for r in requests} == {("0", 1000, None)}
    assert [r.turn for r in requests] == list(range(2 * len(QUESTIONS)))
    asked = [r.delta.removeprefix("USER: ") for r in requests]
    assert asked == [message for question in QUESTIONS for message in question["prompt"]]


def test_the_judge_gets_the_prompts_of_fastchat(bpe_tokenizer: Any, cache: Path) -> None:
    task = load("mt_bench_stream", bpe_tokenizer, cache)
    texts = [" It rains. {question}\n", "Rain.", "5", "10", "print(1)", "It prints.", "Water.", "Gas.", "8", "4"]
    asks = task.asks(dict(reversed(responses(task, *texts).items())))[::-1]
    prompts = [(rubric(ask.rubric).system, rubric(ask.rubric).render(ask.fields)) for ask in asks]
    assert prompts[0] == (
        "You are a helpful assistant.",
        "[Instruction]\nPlease act as an impartial judge and evaluate the quality of the response provided by an AI "
        f"assistant to the user question displayed below. {GENERAL} Begin your evaluation by providing a short "
        f"explanation. Be as objective as possible. {RULES}\n\n[Question]\nWrite about {{answer}} and rain.\n\n"
        "[The Start of Assistant's Answer]\nIt rains. {question}\n[The End of Assistant's Answer]",
    )
    assert prompts[1] == (
        "Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the "
        f"user question displayed below. {GENERAL} You evaluation should focus on the assistant's answer to the second "
        f"user question. Begin your evaluation by providing a short explanation. Be as objective as possible. {RULES}"
        "\n\n",
        "<|The Start of Assistant A's Conversation with User|>\n\n### User:\nWrite about {answer} and rain.\n\n"
        "### Assistant A:\nIt rains. {question}\n\n### User:\nNow in one line.\n\n### Assistant A:\nRain.\n\n"
        "<|The End of Assistant A's Conversation with User|>",
    )
    assert prompts[2] == (
        "You are a helpful assistant.",
        "[Instruction]\nPlease act as an impartial judge and evaluate the quality of the response provided by an AI "
        "assistant to the user question displayed below. Your evaluation should consider correctness and helpfulness. "
        "You will be given a reference answer and the assistant's answer. Begin your evaluation by comparing the "
        "assistant's answer with the reference answer. Identify and correct any mistakes. Be as objective as possible. "
        f"{RULES}\n\n[Question]\nWhat is 2 + 3?\n\n[The Start of Reference Answer]\n5\n[The End of Reference Answer]"
        "\n\n[The Start of Assistant's Answer]\n5\n[The End of Assistant's Answer]",
    )
    assert prompts[3] == (
        "Please act as an impartial judge and evaluate the quality of the response provided by an AI assistant to the "
        "user question. Your evaluation should consider correctness and helpfulness. You will be given a reference "
        "answer and the assistant's answer. You evaluation should focus on the assistant's answer to the second "
        "question. Begin your evaluation by comparing the assistant's answer with the reference answer. Identify and "
        f"correct any mistakes. Be as objective as possible. {RULES}\n\n",
        "<|The Start of Reference Answer|>\n\n### User:\nWhat is 2 + 3?\n\n### Reference answer:\n5\n\n### User:\n"
        "Double it.\n\n### Reference answer:\n10\n\n<|The End of Reference Answer|>\n\n\n"
        "<|The Start of Assistant A's Conversation with User|>\n\n### User:\nWhat is 2 + 3?\n\n### Assistant A:\n5\n\n"
        "### User:\nDouble it.\n\n### Assistant A:\n10\n\n<|The End of Assistant A's Conversation with User|>",
    )
    assert [ask.rubric.partition(":")[2] for ask in asks[4:8]] == [
        "single-math-v1",
        "single-v1-multi-turn",  # the second reference answer is empty
        "single-v1",
        "single-v1-multi-turn",
    ]


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("Good. Rating: [[8]]", 0.8),
        ("[[7.5]] rather than [[9]]", 0.75),
        ("Step [1] is wrong. Rating: [[3]]", 0.3),
        ("Rating: [6]", 0.6),
        ("[[10]]", 1.0),
        ("[[0]]", None),
        ("[[11]]", None),
        ("Rating: 5", None),
        ("[[rating]]", None),
        ("<think>[[9]]</think>[[2]]", 0.2),
    ],
)
def test_the_first_rating_in_brackets_counts(answer: str, score: float | None) -> None:
    marks = rubric("mt_bench:single-v1").read(answer)
    assert marks == (None if score is None else {"score": pytest.approx(score)})


def test_ratings_become_the_score(bpe_tokenizer: Any, cache: Path) -> None:
    task = load("mt_bench_math", bpe_tokenizer, cache)
    marks = [{"score": value} for value in (0.1, 0.4, 1.0, 0.7)]
    scores, mean = task.score(responses(task, "5", "10", "8", "4"), marks)
    assert ([*scores.values()], mean) == ([0.1, 0.4, 1.0, 0.7], pytest.approx(0.55))


def test_questions_in_another_form_are_refused(bpe_tokenizer: Any, tmp_path: Path) -> None:
    keep(SOURCE, [{"category": "math", "prompt": ["One?"], "reference": ["1", "2"]}], tmp_path)
    with pytest.raises(UserError, match="a math question has 1 messages and 2 reference answers, not 2"):
        load("mt_bench_math", bpe_tokenizer, tmp_path)


def test_without_the_hub_one_line_names_the_command(bpe_tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(NeedsHub, match=r"HuggingFaceH4/mt_bench_prompts.*kvbench data fetch mt_bench_math") as failure:
        load("mt_bench_math", bpe_tokenizer, tmp_path)
    assert "\n" not in str(failure.value)
