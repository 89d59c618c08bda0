"""Made-up rows in the schemas of the data sets that lm-eval's tasks read, and `replaced_hub`, which serves them.

Every row is generated from a seed. Names and numbers are words of the reference model's vocabulary, so that its
prompts do not consist of unknown words; the rest is short English sentences.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import datasets

Row = dict[str, Any]

NAMES = (
    "solaz zaziv livat dudif fozez sezik kafid zulem motor kaliv nabos viriz golup zodum kameb velef "
    "gilef tetez vazun tuzol pesiv tenem zolug vobag mipir veger zibaf tavus tagap tenod gidul pozot"
).split()
"""Words of the reference model; here they name people and places."""
VERBS = "paints carries finds repairs counts borrows hides measures sells follows".split()
ADJECTIVES = "copper silver wooden broken heavy bright narrow quiet green frozen".split()
NOUNS = "basket lantern ladder kettle window anchor mirror wagon drum bridge garden letter".split()
PLACES = "river market tower valley harbour orchard station meadow".split()
LETTERS = "ABCDEFGHIJ"


class Writer:
    """Writes the texts of one row.

    Args:
        seed: Seed of its words.
        index: Index of the row in its split.
        config: Name of the data set's configuration, such as a subject.
    """

    def __init__(self, seed: int, index: int, config: str) -> None:
        self.random = random.Random(seed)
        self.index = index
        self.config = config

    def pick(self, options: Any) -> Any:
        """Return one of the options."""
        return self.random.choice(options)

    def below(self, limit: int) -> int:
        """Return a number from 0 to `limit - 1`."""
        return self.random.randrange(limit)

    def name(self) -> str:
        """Return a name."""
        return str(self.pick(NAMES))

    def phrase(self) -> str:
        """Return some words that name a thing; the number of words differs."""
        words = [self.pick(ADJECTIVES), self.pick(NOUNS), "of", self.name(), "and", self.name()]
        return " ".join(words[: self.pick((2, 4, 6))])

    def phrases(self, count: int) -> list[str]:
        """Return phrases that all differ."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.phrase()] = None
        return list(found)

    def clause(self) -> str:
        """Return a sentence without its capital and its full stop."""
        adjective, noun, place = self.pick(ADJECTIVES), self.pick(NOUNS), self.pick(PLACES)
        return f"{self.name()} {self.pick(VERBS)} the {adjective} {noun} of {self.name()} near the {place}"

    def sentence(self) -> str:
        """Return a sentence."""
        clause = self.clause()
        return f"{clause[0].upper()}{clause[1:]}."

    def question(self) -> str:
        """Return a question."""
        return f"What does {self.name()} say when {self.clause()}?"

    def passage(self, count: int) -> str:
        """Return several sentences."""
        return " ".join(self.sentence() for _ in range(count))

    def number(self) -> int:
        """Return a small number."""
        return 1 + self.below(90)

    def sums(self) -> str:
        """Return a question about numbers, which are words of the reference model."""
        first, second = f"#{self.number()}", f"#{self.number()}"
        return f"{self.name()} has {first} baskets and {self.name()} has {second} drums. How many are there?"


@dataclass(frozen=True)
class Table:
    """A data set.

    Attributes:
        row: Writes a row.
        splits: Its splits, with their numbers of rows.
        varied: Splits whose number of rows depends on the configuration: from one to the given number.
    """

    row: Callable[[Writer], Row]
    splits: Mapping[str, int] = field(default_factory=lambda: {"train": 12, "validation": 8, "test": 8})
    varied: tuple[str, ...] = ()

    def rows(self, path: str, config: str) -> dict[str, list[Row]]:
        """Return the rows of a configuration by split."""
        tables = {}
        for split, count in self.splits.items():
            seed = zlib.crc32(f"{path} {config} {split}".encode())
            total = 1 + seed % count if split in self.varied else count
            tables[split] = [self.row(Writer(seed + index, index, config)) for index in range(total)]
        return tables


# --- multiple choice ------------------------------------------------------------------------------


def _arc(writer: Writer) -> Row:
    choices = {"text": writer.phrases(4), "label": list("ABCD")}
    return {
        "id": f"q{writer.index}",
        "question": writer.question(),
        "choices": choices,
        "answerKey": writer.pick("ABCD"),
    }


def _openbookqa(writer: Writer) -> Row:
    row = _arc(writer)
    return row | {"question_stem": row.pop("question").rstrip("?")}


def _mmlu(writer: Writer) -> Row:
    choices, answer = writer.phrases(4), writer.below(4)
    return {"question": writer.question(), "subject": writer.config, "choices": choices, "answer": answer}


def _letters(writer: Writer) -> Row:
    row = _mmlu(writer)
    return row | {"question": f"{writer.passage(4)} {row['question']}"}


def _hellaswag(writer: Writer) -> Row:
    return {
        "ind": writer.index,
        "activity_label": "Repairing a kettle",
        "ctx_a": writer.sentence(),
        "ctx_b": writer.name() if writer.index % 3 else "",
        "endings": [f"{writer.clause()} [title] {writer.name()} [step] again" for _ in range(4)],
        "label": str(writer.below(4)),
    }


def _piqa(writer: Writer) -> Row:
    solutions = {"sol1": writer.sentence(), "sol2": writer.sentence()}
    return {"goal": f"How {writer.clause()}?", **solutions, "label": writer.below(2)}


def _winogrande(writer: Writer) -> Row:
    first, second = writer.name(), writer.name()
    sentence = f"{first} met {second} near the {writer.pick(PLACES)} because _ wanted the {writer.phrase()}."
    return {"sentence": sentence, "option1": first, "option2": second, "answer": writer.pick("12")}


def _super_glue(writer: Writer) -> Row:
    if writer.config == "boolq":
        question, passage = f"does {writer.clause()}", writer.passage(5)
        return {"question": question, "passage": passage, "idx": writer.index, "label": writer.below(2)}
    if writer.config == "copa":
        choices = {"choice1": writer.sentence(), "choice2": writer.sentence()}
        kind = ("cause", "effect")[writer.index % 2]
        return {"premise": writer.sentence(), **choices, "question": kind, "label": writer.below(2)}
    if writer.config == "cb":
        label = writer.index % 3
        return {"premise": writer.passage(2), "hypothesis": writer.clause(), "idx": writer.index, "label": label}
    if writer.config == "wic":
        word = str(writer.pick(NOUNS))
        first, second = f"The {word} of {writer.name()} is old.", f"We saw a {word} near {writer.name()} ."
        places = {"start1": first.index(word), "end1": first.index(word) + len(word)}
        return {"word": word, "sentence1": first, "sentence2": second, **places, "label": writer.below(2)}
    if writer.config == "multirc":
        texts = {"paragraph": writer.passage(4), "question": writer.question(), "answer": writer.phrase()}
        return {**texts, "label": writer.below(2)}
    if writer.config == "wsc.fixed":
        name = writer.name()
        text = f"{name} gave {writer.name()} the {writer.pick(NOUNS)} because she was near the {writer.pick(PLACES)} ."
        place = text.split().index("she")
        spans = {"span1_index": 0, "span2_index": place, "span1_text": name, "span2_text": "she"}
        return {"text": text, **spans, "idx": writer.index, "label": writer.below(2)}
    # rte
    return {"premise": writer.passage(2), "hypothesis": writer.sentence(), "label": writer.below(2)}


def _glue(writer: Writer) -> Row:
    labels = 3 if writer.config == "mnli" else 2
    label = {"idx": writer.index, "label": writer.below(labels)}
    if writer.config in ("cola", "sst2"):
        return {"sentence": writer.clause(), **label}
    if writer.config == "qqp":
        return {"question1": writer.question(), "question2": writer.question(), **label}
    if writer.config == "mnli":
        return {"premise": writer.sentence(), "hypothesis": writer.clause(), **label}
    if writer.config == "qnli":
        return {"question": writer.question(), "sentence": writer.sentence(), **label}
    return {"sentence1": writer.sentence(), "sentence2": writer.sentence(), **label}


def _sciq(writer: Writer) -> Row:
    wrong = {f"distractor{number}": writer.phrase() for number in (1, 2, 3)}
    support = f" {writer.passage(2)}" if writer.index % 3 else ""
    return {"question": writer.question(), **wrong, "correct_answer": writer.phrase(), "support": support}


def _race(writer: Writer) -> Row:
    problems = [
        {
            "question": f"{writer.clause()}  _  ." if number == 0 else writer.question(),
            "answer": writer.pick("ABCD"),
            "options": writer.phrases(4),
        }
        for number in range(3)
    ]
    return {"article": writer.passage(6), "problems": str(problems)}


def _truthfulqa(writer: Writer) -> Row:
    texts = {"question": writer.question()}
    if writer.config == "generation":
        answers = {"correct_answers": [writer.sentence(), writer.sentence()], "incorrect_answers": [writer.sentence()]}
        return {**texts, "best_answer": writer.sentence(), **answers}
    choices = [writer.sentence() for _ in range(3 + writer.index % 3)]
    wrong = [0] * (len(choices) - 2)
    return {
        **texts,
        "mc1_targets": {"choices": choices, "labels": [1, 0, *wrong]},
        "mc2_targets": {"choices": choices, "labels": [1, 1, *wrong]},
    }


def _gpqa(writer: Writer) -> Row:
    right, *wrong = writer.phrases(4)
    answers = {f"Incorrect Answer {number}": text for number, text in enumerate(wrong, 1)}
    return {"Question": f" {writer.question()}", **answers, "Correct Answer": f"{right}\n"}


def _xnli(writer: Writer) -> Row:
    return {"premise": writer.clause(), "hypothesis": writer.sentence(), "label": writer.index % 3}


def _xcopa(writer: Writer) -> Row:
    choices = {"choice1": writer.sentence(), "choice2": writer.sentence()}
    kind = ("cause", "effect")[writer.index % 2]
    return {"premise": writer.sentence(), **choices, "question": kind, "label": writer.below(2)}


def _paws(writer: Writer) -> Row:
    second = writer.sentence() if writer.index % 4 else ""  # a row without a sentence is left out
    return {"id": writer.index, "sentence1": writer.sentence(), "sentence2": second, "label": writer.below(2)}


def _logiqa(writer: Writer) -> Row:
    texts = {"context": writer.passage(3), "question": writer.question()}
    return {"label": writer.pick("abcd"), **texts, "options": writer.phrases(4)}


def _logiqa2(writer: Writer) -> Row:
    texts = {"text": writer.passage(3), "question": writer.question()}
    return {"answer": writer.below(4), **texts, "options": writer.phrases(4)}


def _mathqa(writer: Writer) -> Row:
    options = " , ".join(f"{letter} ) {writer.number()}" for letter in "abcde")
    return {
        "Problem": writer.sums(),
        "Rationale": writer.sentence(),
        "options": options,
        "correct": writer.pick("abcde"),
    }


def _medqa(writer: Writer) -> Row:
    endings = {f"ending{number}": text for number, text in enumerate(writer.phrases(4))}
    return {"id": str(writer.index), "sent1": writer.passage(2), "sent2": "", **endings, "label": writer.below(4)}


def _medmcqa(writer: Writer) -> Row:
    options = dict(zip(("opa", "opb", "opc", "opd"), writer.phrases(4), strict=True))
    return {"id": str(writer.index), "question": writer.question(), **options, "cop": writer.below(4)}


def _commonsense_qa(writer: Writer) -> Row:
    choices = {"label": list("ABCDE"), "text": writer.phrases(5)}
    return {
        "id": str(writer.index),
        "question": writer.question(),
        "choices": choices,
        "answerKey": writer.pick("ABCDE"),
    }


def _social_iqa(writer: Writer) -> Row:
    answers = dict(zip(("answerA", "answerB", "answerC"), writer.phrases(3), strict=True))
    return {"context": writer.sentence(), "question": writer.question(), **answers, "label": writer.pick("123")}


def _swag(writer: Writer) -> Row:
    endings = {f"ending{number}": writer.clause() for number in range(4)}
    return {"startphrase": f"{writer.sentence()} {writer.name()}", **endings, "label": writer.below(4)}


def _blimp(writer: Writer) -> Row:
    words = writer.clause().split()
    return {
        "sentence_good": f"{' '.join(words)}.",
        "sentence_bad": f"{' '.join(words[::-1])}.",
        "pair_id": writer.index,
    }


def _story(writer: Writer) -> Row:
    story = {f"input_sentence_{number}": writer.sentence() for number in (1, 2, 3, 4)}
    endings = {"sentence_quiz1": writer.sentence(), "sentence_quiz2": writer.sentence()}
    return {"story_id": str(writer.index), **story, **endings, "answer_right_ending": 1 + writer.below(2)}


def _web_questions(writer: Writer) -> Row:
    answers = writer.phrases(2 + writer.index % 3)
    return {"url": "", "question": writer.question(), "answers": [*answers, f"{answers[0]} again"]}


def _anli(writer: Writer) -> Row:
    return {
        "uid": str(writer.index),
        "premise": writer.passage(2),
        "hypothesis": writer.sentence(),
        "label": writer.below(3),
    }


def _wsc273(writer: Writer) -> Row:
    first, second = writer.name(), f"The {writer.pick(NOUNS)}"
    text = f"{first} put the {writer.pick(NOUNS)} near {second.lower()} because it was {writer.pick(ADJECTIVES)}."
    place = text.index(" it ") + 1
    return {"text": text, "pronoun": "it", "pronoun_loc": place, "options": [first, second], "label": writer.below(2)}


def _prost(writer: Writer) -> Row:
    choices = dict(zip("ABCD", writer.phrases(4), strict=True))
    question = writer.question()
    texts = {"context": writer.sentence(), "question": question, "ex_question": question}
    return {**choices, **texts, "group": "g", "label": writer.below(4), "name": "n"}


def _pubmedqa(writer: Writer) -> Row:
    contexts = [writer.passage(2), writer.sentence()]
    return {"QUESTION": writer.question(), "CONTEXTS": contexts, "final_decision": writer.pick(("yes", "no", "maybe"))}


def _headqa(writer: Writer) -> Row:
    answers = [{"aid": number, "atext": text} for number, text in enumerate(writer.phrases(4), 1)]
    return {"qid": str(writer.index), "qtext": writer.question(), "ra": 1 + writer.below(4), "answers": answers}


def _mutual(writer: Writer) -> Row:
    article = f"m : {writer.clause()} . f : {writer.clause()} ? m : {writer.clause()} ."
    options = [f"f : {writer.clause()} ." for _ in range(4)]
    return {"answers": writer.pick("ABCD"), "options": options, "article": article, "id": str(writer.index)}


def _crows_pairs(writer: Writer) -> Row:
    sentences = {"sent_more": writer.sentence(), "sent_less": writer.sentence()}
    return {"id": writer.index, **sentences, "bias_type": "age"}


def _ethics(writer: Writer) -> Row:
    return {"label": writer.below(2), "input": writer.sentence(), "is_short": True, "edited": False}


def _belebele(writer: Writer) -> Row:
    answers = {f"mc_answer{number}": text for number, text in enumerate(writer.phrases(4), 1)}
    texts = {"flores_passage": writer.passage(3), "question": writer.question()}
    return {**texts, **answers, "correct_answer_num": writer.pick("1234")}


def _toxigen(writer: Writer) -> Row:
    return {"text": writer.sentence(), "toxicity_ai": float(writer.below(6)), "toxicity_human": float(writer.below(6))}


def _qa4mre(writer: Writer) -> Row:
    answers = {"answer_id": [str(number) for number in range(1, 6)], "answer_str": writer.phrases(5)}
    texts = {"document_str": f" {writer.passage(5)} ", "question_str": writer.question()}
    return {**texts, "answer_options": answers, "correct_answer_id": writer.pick("12345")}


# --- log-likelihoods of texts ---------------------------------------------------------------------


def _lambada(writer: Writer) -> Row:
    return {"text": f"{writer.passage(3)} “Yes,” said {writer.name()} and gave the basket to {writer.name()}"}


def _arithmetic(writer: Writer) -> Row:
    first, second = writer.number(), writer.number()
    return {"context": f"\n\nQ: What is {first} plus {second}?\n\nA:", "completion": f" {first + second}"}


def _asdiv(writer: Writer) -> Row:
    body = f"{writer.name()} has {writer.number()} baskets."
    return {"body": body, "question": "How many are there?", "answer": f"{writer.number()} (baskets)", "formula": ""}


def _wikitext(writer: Writer) -> Row:
    lines = [f" = {writer.name()} = ", *(f" {writer.clause()} , {writer.clause()} . " for _ in range(8))]
    return {"page": "\n \n".join(lines)}


def _document(writer: Writer) -> Row:
    return {"text": f'{writer.passage(6)} "{writer.clause()}" : {writer.name()} \n {writer.passage(2)}'}


# --- answers --------------------------------------------------------------------------------------


def _gsm8k(writer: Writer) -> Row:
    total = writer.number()
    return {
        "question": writer.sums(),
        "answer": f"{writer.sentence()}\nThat is <<{total}+0={total}>>{total}.\n#### {total}",
    }


def _math(writer: Writer) -> Row:
    solution = f"{writer.sentence()} The answer is $\\boxed{{{writer.number()}}}$."
    return {"problem": writer.sums(), "level": "Level 1", "type": "Algebra", "solution": solution}


def _trivia(writer: Writer) -> Row:
    aliases = [writer.name(), writer.phrase()]
    return {"question": writer.question().rstrip("?"), "question_id": str(writer.index), "answer": {"aliases": aliases}}


def _nq_open(writer: Writer) -> Row:
    return {"question": f"who {writer.clause()}", "answer": [writer.name(), f"The {writer.phrase()}"]}


def _drop(writer: Writer) -> Row:
    nothing = {"day": "", "month": "", "year": ""}
    spans = [] if writer.index % 2 else [writer.name(), writer.phrase()]
    number = str(writer.number()) if writer.index % 2 else ""
    answer = {"number": number, "date": nothing, "spans": spans}
    other = {"number": ["", "7"], "date": [nothing, nothing], "spans": [[writer.name()], []]}
    texts = {"passage": writer.passage(5), "question": writer.sums()}
    return {"section_id": "s", "query_id": str(writer.index), **texts, "answer": answer, "validated_answers": other}


def _mmlu_pro(writer: Writer) -> Row:
    answer = writer.below(10)
    thought = f"A: Let's think step by step. {writer.sentence()} The answer is ({LETTERS[answer]})."
    return {
        "question_id": writer.index,
        "question": writer.question(),
        "options": writer.phrases(10),
        "answer": LETTERS[answer],
        "answer_index": answer,
        "cot_content": thought,
        "category": "biology" if writer.index % 4 else "physics",
    }


def _bbh(writer: Writer) -> Row:
    options = "\n".join(f"({letter}) {text}" for letter, text in zip("AB", writer.phrases(2), strict=True))
    target = writer.pick(("True", "False")) if writer.config == "boolean_expressions" else writer.pick(("(A)", "(B)"))
    return {"input": f"{writer.question()}\nOptions:\n{options}", "target": target}


def _mgsm(writer: Writer) -> Row:
    number = writer.number()
    # The rows of the test split have no answer in words.
    answer = f"Step-by-Step Answer: {writer.sentence()} The answer is {number}." if writer.index % 2 else None
    question = f"Question: {writer.sums()}" if answer else writer.sums()
    return {"question": question, "answer": answer, "answer_number": number, "equation_solution": None}


def _unscramble(writer: Writer) -> Row:
    word = writer.name()
    return {"context": f"Please unscramble the letters into a word.\n{word[1:]}{word[0]} =", "completion": word}


def _babi(writer: Writer) -> Row:
    return {
        "passage": f"{writer.passage(3)}\n",
        "question": f"Where is {writer.name()} ?",
        "answer": writer.name(),
        "task": 1,
    }


def _completion(writer: Writer) -> Row:
    ids = {"doc_id": str(writer.index), "title": writer.name(), "key": "name"}
    return {**ids, "text": f"{writer.passage(3)} The name is ", "value": f" {writer.name()}"}


_SMALL_TEST = {"test": 8}
_TABLES = {
    # lm-eval's `openllm` shows 25 examples of ARC.
    "allenai/ai2_arc": Table(_arc, {"train": 28, "validation": 8, "test": 8}),
    "allenai/openbookqa": Table(_openbookqa),
    "cais/mmlu": Table(_mmlu, {"test": 8, "validation": 4, "dev": 6}, varied=("test",)),
    "Rowan/hellaswag": Table(_hellaswag),
    "baber/piqa": Table(_piqa),
    "allenai/winogrande": Table(_winogrande),
    "aps/super_glue": Table(_super_glue),
    "nyu-mll/glue": Table(_glue, {"train": 12, "validation": 8, "validation_matched": 8, "test": 8}),
    "allenai/sciq": Table(_sciq),
    "EleutherAI/race": Table(_race),
    "truthfulqa/truthful_qa": Table(_truthfulqa, {"validation": 8}),
    "Idavidrein/gpqa": Table(_gpqa, {"train": 10}),
    "facebook/xnli": Table(_xnli),
    "cambridgeltl/xcopa": Table(_xcopa, {"validation": 8, "test": 8}),
    "google-research-datasets/paws-x": Table(_paws),
    "EleutherAI/logiqa": Table(_logiqa),
    "baber/logiqa2": Table(_logiqa2),
    "regisss/math_qa": Table(_mathqa),
    "GBaker/MedQA-USMLE-4-options-hf": Table(_medqa),
    "openlifescienceai/medmcqa": Table(_medmcqa),
    "tau/commonsense_qa": Table(_commonsense_qa),
    "lighteval/siqa": Table(_social_iqa, {"train": 12, "validation": 8}),
    "allenai/swag": Table(_swag),
    "nyu-mll/blimp": Table(_blimp, {"train": 8}),
    "LSDSem/story_cloze": Table(_story, {"validation": 8, "test": 8}),
    "juletxara/xstory_cloze": Table(_story, {"train": 12, "eval": 8}),
    "stanfordnlp/web_questions": Table(_web_questions, {"train": 12, "test": 8}),
    "facebook/anli": Table(_anli, {"train_r1": 12, "dev_r1": 8, "test_r1": 8}),
    "lighteval/winograd_wsc": Table(_wsc273, _SMALL_TEST),
    "corypaik/prost": Table(_prost, _SMALL_TEST),
    "bigbio/pubmed_qa": Table(_pubmedqa),
    "EleutherAI/headqa": Table(_headqa),
    "EleutherAI/mutual": Table(_mutual, {"train": 12, "validation": 8}),
    "jannalu/crows_pairs_multilingual": Table(_crows_pairs, _SMALL_TEST),
    "EleutherAI/hendrycks_ethics": Table(_ethics, {"train": 12, "test": 8}),
    "facebook/belebele": Table(_belebele, _SMALL_TEST),
    "Muennighoff/xwinograd": Table(_winogrande, _SMALL_TEST),
    "skg/toxigen-data": Table(_toxigen, {"train": 12, "test": 8}),
    "community-datasets/qa4mre": Table(_qa4mre, {"train": 8}),
    "EleutherAI/lambada_openai": Table(_lambada, _SMALL_TEST),
    "EleutherAI/arithmetic": Table(_arithmetic, {"validation": 8}),
    "EleutherAI/asdiv": Table(_asdiv, {"validation": 8}),
    "EleutherAI/wikitext_document_level": Table(_wikitext),
    "allenai/c4": Table(_document, {"train": 8, "validation": 8}),
    "NeelNanda/pile-10k": Table(_document, {"train": 8}),
    "allenai/paloma": Table(_document, {"val": 8, "test": 8}),
    "openai/gsm8k": Table(_gsm8k, {"train": 12, "test": 8}),
    "EleutherAI/hendrycks_math": Table(_math, {"train": 12, "test": 8}),
    "mandarjoshi/trivia_qa": Table(_trivia),
    "google-research-datasets/nq_open": Table(_nq_open, {"train": 12, "validation": 8}),
    "EleutherAI/drop": Table(_drop, {"train": 12, "validation": 8}),
    "TIGER-Lab/MMLU-Pro": Table(_mmlu_pro, {"test": 12, "validation": 12}),
    "SaylorTwift/bbh": Table(_bbh, _SMALL_TEST, varied=("test",)),
    "juletxara/mgsm": Table(_mgsm, {"train": 8, "test": 8}),
    "EleutherAI/unscramble": Table(_unscramble, {"validation": 8}),
    "Muennighoff/babi": Table(_babi, {"train": 12, "valid": 8, "test": 8}),
    # Of one subject, for timings.
    "made-up/letters": Table(_letters, {"test": 100, "dev": 5}),
    "hazyresearch/based-fda": Table(_completion, {"validation": 8}),
    "hazyresearch/based-swde-v2": Table(_completion, {"validation": 8}),
}


def _path_of(path: str, options: Mapping[str, Any]) -> str:
    """Return the name of a data set; a task may name files of it instead."""
    files = options.get("data_files")
    if path != "json" or not files:
        return path
    first_file = next(iter(files.values())) if isinstance(files, dict) else files
    return "/".join(str(first_file).removeprefix("hf://datasets/").split("/")[:2])


@contextlib.contextmanager
def replaced_hub(folder: Path) -> Iterator[None]:
    """Serve made-up rows instead of the hub's.

    They are read from disk, as downloaded ones are: `datasets` then keeps what a task made of them, such as shuffled
    choices, in its cache beside them.

    Args:
        folder: Where rows and caches are stored. In an empty folder nothing is left of an earlier evaluation.

    Raises:
        LookupError: A task reads a data set that has no rows here.
    """

    def load_dataset(path: str, name: str | None = None, split: str | None = None, **options: Any) -> Any:
        dataset_path, config = _path_of(path, options), name or ""
        table = _TABLES.get(dataset_path)
        if table is None:
            raise LookupError(f"data set {dataset_path!r} has no made-up rows; add them to {__file__}")
        target = folder / dataset_path.replace("/", "--") / (config or "default")
        if not target.exists():
            rows = table.rows(dataset_path, config)
            tables = {split_name: datasets.Dataset.from_list(split_rows) for split_name, split_rows in rows.items()}
            datasets.DatasetDict(tables).save_to_disk(str(target))
        loaded = datasets.load_from_disk(str(target))
        return loaded if split is None else loaded[split]

    with mock.patch.object(datasets, "load_dataset", load_dataset):
        yield
