"""The training samples are well formed and solvable."""

from __future__ import annotations

import numpy as np
import pytest

from kvbench.reference import grammar, samples
from kvbench.reference.samples import Knobs, NeedleQuestion

LENGTHS = (64, 200, 512)


def _split(sample: samples.Sample) -> tuple[list[str], list[NeedleQuestion]]:
    """Return the unsupervised words of a sample, joined, and its questions."""
    words: list[str] = []
    questions = []
    for part in sample.parts:
        if isinstance(part, list):
            words += part
        else:
            questions.append(part)
    return words, questions


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", list(samples.TASKS))
def test_samples_fit_and_answers_end_with_a_stop(task: str, length: int) -> None:
    for seed in range(5):
        sample = samples.draw(np.random.default_rng(seed), task, length, Knobs())
        words, questions = _split(sample)
        assert words[0] == grammar.BOS
        assert questions
        assert length - 8 <= sum(len(part) for part in sample.parts) <= length
        assert set(words) <= set(grammar.VOCABULARY)
        for question in questions:
            if task != "repeat":
                assert question.answer[-1] == grammar.STOP
                assert grammar.STOP not in question.answer[:-1]


@pytest.mark.parametrize("task", ["single", "multikey", "uuid", "multivalue", "dialogue"])
def test_answers_to_facts_are_exactly_the_notes_of_the_context(task: str) -> None:
    for seed in range(10):
        sample = samples.draw(np.random.default_rng(seed), task, 300, Knobs())
        words, questions = _split(sample)
        text = " ".join(words)
        for question in questions:
            key = " ".join(question.prompt[1:])
            notes = [part.split(" .")[0] for part in text.split(f"note {key} ")[1:]]
            assert " , ".join(notes) + " ." == " ".join(question.answer)
            if len(question.prompt) == 2:
                assert words.count(key) == len(notes)


def test_chains_follow_the_assignments() -> None:
    for seed in range(10):
        words, questions = _split(samples.draw(np.random.default_rng(seed), "vt", 300, Knobs(hops=(0, 4))))
        starts = [n for n, word in enumerate(words) if word == "let"]
        following = {words[n + 1]: words[n + 2] for n in starts}
        assert len(following) == len(starts)
        for question in questions:
            at, chain = question.prompt[1], []
            while at in following:
                at = following[at]
                chain.append(at)
            assert chain == question.answer[:-1]


@pytest.mark.parametrize("length", [96, 512, 1500])
def test_counts_of_bags_give_the_answer(length: int) -> None:
    for task, size in (("cwe", 10), ("fwe", 3)):
        for seed in range(5):
            words, (question,) = _split(samples.draw(np.random.default_rng(seed), task, length, Knobs()))
            names, counts = np.unique(words[1:], return_counts=True)
            order = np.argsort(-counts)
            top = [str(name) for name in names[order[:size]]]
            assert counts[order[size - 1]] > counts[order[size]]
            answer = question.answer[:-1]
            assert (sorted(answer) == sorted(top)) if task == "cwe" else (answer == top)


def test_too_short_a_sequence_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="fits into"):
        samples.draw(np.random.default_rng(0), "fwe", 12, Knobs())
