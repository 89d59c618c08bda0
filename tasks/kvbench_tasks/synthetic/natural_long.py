"""Long answers and dialogues in English, over generated prose. The prompts are kvbench's.

An answer takes about a quarter of the length, at most `MOST` tokens. The statements that contain it take as much again
or twice as much, and prose fills the rest.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from itertools import islice

from kvbench_tasks.synthetic.fitting import Doc, HaystackPlan, Streams, apart, fewer, scatter
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


def listing(streams: Streams, length: int, count_tokens: Tokens) -> list[HaystackPlan]:
    """Plan list items, each stated in a sentence somewhere in the text.

    Args:
        streams: The sample's random generators.
        length: Tokens of prompt and answer; determines the number of items.
        count_tokens: Counts the tokens of an answer.
    """
    item_iterator = compounds(streams["items"])
    item_names: list[str] = []

    def render_line(item_index: int) -> str:
        while len(item_names) <= item_index:
            item_names.append(next(item_iterator))
        return f"{item_index + 1}. {item_names[item_index]}\n"

    generator = streams["depth"]
    max_items = _count(render_line, length, count_tokens)
    depths = [generator.random() for _ in range(max_items)]

    def plan(item_count: int) -> HaystackPlan:
        statements = [
            (depths[item_index], f"Item {item_index + 1} of the list is {item_names[item_index]}.")
            for item_index in range(item_count)
        ]
        answer = "".join(map(render_line, range(item_count)))
        return _plan(
            streams,
            _LIST,
            statements,
            item_names[:item_count],
            "numbered",
            count_tokens(answer),
            n=item_count,
        )

    return [plan(item_count) for item_count in fewer(max_items)]


def passage(streams: Streams, length: int, count_tokens: Tokens) -> list[HaystackPlan]:
    """Plan a passage of sentences between two marks."""
    sentences: list[str] = []
    prose_sentences = prose(streams["passage"])

    def render_line(line_index: int) -> str:
        while len(sentences) <= line_index:
            sentences.append(" ".join(next(prose_sentences)))
        return sentences[line_index] + "\n"

    depth = streams["depth"].random()

    def plan(line_count: int) -> HaystackPlan:
        answer = "".join(map(render_line, range(line_count)))
        statements = [(depth, f"\n[BEGIN]\n{answer}[END]\n")]
        return _plan(streams, _COPY, statements, sentences[:line_count], "lines", count_tokens(answer))

    return [plan(line_count) for line_count in fewer(_count(render_line, length, count_tokens))]


def steps(streams: Streams, length: int, count_tokens: Tokens) -> list[HaystackPlan]:
    """Plan two interleaved chains of assignments."""
    generator = streams["chain"]
    start_values = [str(start_value) for start_value in generator.sample(range(10000, 100000), _CHAINS)]
    used_variables: set[str] = set()
    chains: list[list[str]] = [[] for _ in start_values]

    def render_line(step_index: int) -> str:
        for chain, start_value in zip(chains, start_values, strict=True):
            while len(chain) <= step_index:
                variable = "".join(generator.choices(string.ascii_uppercase, k=5))
                if variable in used_variables:
                    continue
                used_variables.add(variable)
                source = f"VAR {chain[-1].split()[1]}" if chain else start_value
                chain.append(f"VAR {variable} = {source}")
        return chains[0][step_index] + "\n"

    max_steps = _count(render_line, length, count_tokens)
    depth_generator = streams["depth"]
    depths = [[depth_generator.random() for _ in range(max_steps)] for _ in chains]

    def plan(step_count: int) -> HaystackPlan:
        statements = [
            (depth, f"{step}.")
            for chain, chain_depths in zip(chains, depths, strict=True)
            for depth, step in zip(sorted(chain_depths[:step_count]), chain[:step_count], strict=True)
        ]
        answer = "".join(map(render_line, range(step_count)))
        answer_tokens = count_tokens(answer)
        return _plan(
            streams,
            _STEPS,
            statements,
            chains[0][:step_count],
            "lines",
            answer_tokens,
            value=start_values[0],
        )

    return [plan(step_count) for step_count in fewer(max_steps)]


def dialogue(streams: Streams, turns: int, facts: int) -> list[HaystackPlan]:
    """Plan codes that are stated, and asked for in the same turn or later.

    Args:
        streams: The sample's random generators.
        turns: Maximum number of turns; fewer if room is short.
        facts: New codes per turn.
    """
    key_iterator = compounds(streams["keys"])
    key_names = [key_name.replace("-", " ") for key_name in islice(key_iterator, turns * facts)]
    codes = streams["codes"].sample(range(10**6, 10**7), len(key_names))
    fact_texts = [_FACT.format(key=key, value=code) for key, code in zip(key_names, codes, strict=True)]
    generator = streams["depth"]
    depths = [generator.random() for _ in fact_texts]

    def plan(turn_count: int) -> HaystackPlan:
        query_facts = asked_facts(streams.fresh("query"), turn_count, facts)
        split_sizes = apart(streams.fresh("shares"), turn_count)
        fillers = [words_of(prose(streams.fresh(f"prose {turn_index}"))) for turn_index in range(turn_count)]

        def build(haystack_size: int) -> Doc:
            turn_docs: list[Doc] = []
            for turn_index, (query_fact, prose_size) in enumerate(
                zip(query_facts, split_sizes(haystack_size), strict=True)
            ):
                turn_statements = [
                    (depths[fact_index], fact_texts[fact_index])
                    for fact_index in range(turn_index * facts, (turn_index + 1) * facts)
                ]
                turn_text = " ".join(scatter(fillers[turn_index](prose_size), turn_statements))
                code = str(codes[query_fact])
                turn_docs.append(
                    {
                        "context": f"{'' if turn_index else _HELLO}{turn_text}\n\n",
                        "question": _ASK.format(key=key_names[query_fact]),
                        "answer": code,
                        "outputs": [code],
                        "max_new_tokens": _CODE_TOKENS,
                        "extra": {"age": turn_index - query_fact // facts},
                    }
                )
            return {"turns": turn_docs, "frame": _FRAME, "until": ["\n"]}

        return HaystackPlan(build)

    return [plan(turn_count) for turn_count in range(turns, 1, -1)]


def _count(render_line: Callable[[int], str], length: int, count_tokens: Tokens) -> int:
    """Estimate from the first sixteen lines how many lines take a quarter of the length."""
    tokens_per_line = max(1.0, count_tokens("".join(map(render_line, range(16)))) / 16)
    line_count = max(4, int(min(length / 4, MOST) / tokens_per_line))
    render_line(line_count)
    return line_count


def _plan(
    streams: Streams,
    prompt_texts: tuple[str, str, str],
    statements: Sequence[tuple[float, str]],
    outputs: Sequence[str],
    form: str,
    answer_tokens: int,
    **fields: object,
) -> HaystackPlan:
    """Plan statements among prose.

    `prompt_texts` are the text before the prose, the question, and the beginning of the answer.
    """
    preamble, question, gen_prefix = prompt_texts
    filler = words_of(prose(streams.fresh("prose")))
    max_new_tokens = answer_tokens + answer_tokens // 8 + 16  # an answer may be worded differently

    def build(haystack_size: int) -> Doc:
        haystack = " ".join(scatter(filler(haystack_size), statements)).replace(" \n", "\n").replace("\n ", "\n")
        return {
            "context": f"{preamble.format(**fields)}{haystack.strip()}\n\n",
            "question": question.format(**fields),
            "gen_prefix": gen_prefix,
            "outputs": list(outputs),
            "form": form,
            "until": [],
            "max_new_tokens": max_new_tokens,
        }

    return HaystackPlan(build)
