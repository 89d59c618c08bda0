"""Long answers and dialogues in English, over generated prose. The prompts are our own.

An answer takes about a quarter of the length, at most `MOST` tokens. The statements that tell it
take about as much again, or twice as much, and prose fills the rest.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from itertools import islice

from kvbench_tasks.synthetic.fitting import Doc, Plan, Streams, apart, fewer, scatter
from kvbench_tasks.synthetic.lexicon import Tokens, asked_facts
from kvbench_tasks.synthetic.words import compounds, prose, words_of

MOST = 2048

_LIST = (
    "The text below tells the {n} items of a numbered list, out of order. Memorize all of them: "
    "you will be asked to write the list down.\n\n",
    "Write down the whole list, from item 1 to item {n}, in the order of the numbers. Put each "
    'item on a line of its own, like "1. item", and write nothing else.',
    "Answer: The list is:",
)
_COPY = (
    "The text below contains a passage, between a line [BEGIN] and a line [END]. Memorize it: you "
    "will be asked to copy it.\n\n",
    "Copy the passage between [BEGIN] and [END] word for word. Put each of its sentences on a line "
    "of its own, and write nothing else.",
    "Answer: The passage is:",
)
_STEPS = (
    "In the text below, variables are assigned a value or another variable. Memorize and track the "
    "chains of assignments.\n\n",
    "Which chain of assignments begins with the value {value}? Write down all of its steps in "
    "order, from that value to the last variable. Put each step on a line of its own, like "
    '"VAR X = VAR Y", and write nothing else.',
    "Answer: The steps are:",
)
_CHAINS = 2
_HELLO = (
    "I am going to tell you things over several messages, and ask you about them as we go. Answer "
    "each question with the code alone.\n\n"
)
_FACT = "The code of the {key} is {value}."
_ASK = "What is the code of the {key}?"
_CODE_TOKENS = 32
_FRAME = {"user": "User:\n", "assistant": "\n\nAssistant:\n", "end": "\n\n"}


def listing(streams: Streams, length: int, tokens: Tokens) -> list[Plan]:
    """Items of a list, each stated in a sentence somewhere in the text.

    Args:
        streams: The sample's generators.
        length: Tokens of prompt and answer; decides how many items.
        tokens: Counts the tokens of an answer.
    """
    items = compounds(streams["items"])
    names: list[str] = []

    def line(i: int) -> str:
        while len(names) <= i:
            names.append(next(items))
        return f"{i + 1}. {names[i]}\n"

    rng = streams["depth"]
    count = _count(line, length, tokens)
    depths = [rng.random() for _ in range(count)]

    def plan(n: int) -> Plan:
        told = [(depths[i], f"Item {i + 1} of the list is {names[i]}.") for i in range(n)]
        answer = "".join(map(line, range(n)))
        return _plan(streams, _LIST, told, names[:n], "numbered", tokens(answer), n=n)

    return [plan(n) for n in fewer(count)]


def passage(streams: Streams, length: int, tokens: Tokens) -> list[Plan]:
    """A passage of sentences between two marks."""
    sentences: list[str] = []
    made = prose(streams["passage"])

    def line(i: int) -> str:
        while len(sentences) <= i:
            sentences.append(" ".join(next(made)))
        return sentences[i] + "\n"

    depth = streams["depth"].random()

    def plan(n: int) -> Plan:
        answer = "".join(map(line, range(n)))
        told = [(depth, f"\n[BEGIN]\n{answer}[END]\n")]
        return _plan(streams, _COPY, told, sentences[:n], "lines", tokens(answer))

    return [plan(n) for n in fewer(_count(line, length, tokens))]


def steps(streams: Streams, length: int, tokens: Tokens) -> list[Plan]:
    """Two chains of assignments, interleaved."""
    rng = streams["chain"]
    values = [str(value) for value in rng.sample(range(10000, 100000), _CHAINS)]
    taken: set[str] = set()
    chains: list[list[str]] = [[] for _ in values]

    def line(i: int) -> str:
        for chain, value in zip(chains, values, strict=True):
            while len(chain) <= i:
                variable = "".join(rng.choices(string.ascii_uppercase, k=5))
                if variable in taken:
                    continue
                taken.add(variable)
                source = f"VAR {chain[-1].split()[1]}" if chain else value
                chain.append(f"VAR {variable} = {source}")
        return chains[0][i] + "\n"

    count = _count(line, length, tokens)
    depth = streams["depth"]
    depths = [[depth.random() for _ in range(count)] for _ in chains]

    def plan(n: int) -> Plan:
        told = [
            (where, f"{step}.")
            for chain, places in zip(chains, depths, strict=True)
            for where, step in zip(sorted(places[:n]), chain[:n], strict=True)
        ]
        answer = "".join(map(line, range(n)))
        used = tokens(answer)
        return _plan(streams, _STEPS, told, chains[0][:n], "lines", used, value=values[0])

    return [plan(n) for n in fewer(count)]


def dialogue(streams: Streams, turns: int, facts: int) -> list[Plan]:
    """Codes that are told, and asked for in the same turn or later.

    Args:
        streams: The sample's generators.
        turns: How many, where there is room; else fewer.
        facts: New codes of each turn.
    """
    keys = compounds(streams["keys"])
    names = [name.replace("-", " ") for name in islice(keys, turns * facts)]
    codes = streams["codes"].sample(range(10**6, 10**7), len(names))
    told = [_FACT.format(key=key, value=code) for key, code in zip(names, codes, strict=True)]
    rng = streams["depth"]
    depths = [rng.random() for _ in told]

    def plan(count: int) -> Plan:
        asked = asked_facts(streams.fresh("query"), count, facts)
        shares = apart(streams.fresh("shares"), count)
        fillers = [words_of(prose(streams.fresh(f"prose {turn}"))) for turn in range(count)]

        def build(n: int) -> Doc:
            rows: list[Doc] = []
            for turn, (fact, size) in enumerate(zip(asked, shares(n), strict=True)):
                own = [(depths[i], told[i]) for i in range(turn * facts, (turn + 1) * facts)]
                text = " ".join(scatter(fillers[turn](size), own))
                code = str(codes[fact])
                rows.append(
                    {
                        "context": f"{'' if turn else _HELLO}{text}\n\n",
                        "question": _ASK.format(key=names[fact]),
                        "answer": code,
                        "outputs": [code],
                        "max_new_tokens": _CODE_TOKENS,
                        "extra": {"age": turn - fact // facts},
                    }
                )
            return {"turns": rows, "frame": _FRAME, "until": ["\n"]}

        return Plan(build)

    return [plan(count) for count in range(turns, 1, -1)]


def _count(line: Callable[[int], str], length: int, tokens: Tokens) -> int:
    """Estimate from the first sixteen lines how many lines take a quarter of the length."""
    each = max(1.0, tokens("".join(map(line, range(16)))) / 16)
    count = max(4, int(min(length / 4, MOST) / each))
    line(count)
    return count


def _plan(
    streams: Streams,
    texts: tuple[str, str, str],
    told: Sequence[tuple[float, str]],
    outputs: Sequence[str],
    form: str,
    used: int,
    **names: object,
) -> Plan:
    """Statements among prose.

    `texts` are those of the prompt: before the prose, the question, and the start of the answer.
    """
    before, question, begun = texts
    filler = words_of(prose(streams.fresh("prose")))
    limit = used + used // 8 + 16  # an answer may be worded differently

    def build(n: int) -> Doc:
        body = " ".join(scatter(filler(n), told)).replace(" \n", "\n").replace("\n ", "\n")
        return {
            "context": f"{before.format(**names)}{body.strip()}\n\n",
            "question": question.format(**names),
            "gen_prefix": begun,
            "outputs": list(outputs),
            "form": form,
            "until": [],
            "max_new_tokens": limit,
        }

    return Plan(build)
