"""Solvers that know the tasks from their prompts alone and nothing about the generators."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

NEEDLE = re.compile(r"One of the special magic (\w+) for (.+?) is: (\S+?)\.(?=\s|$)")


def solve(leaf: str, lexicon: str, context: str, question: str) -> list[str]:
    """The reference answers, read out of a prompt."""
    question = question.split("<|im_end|>")[0]  # what a chat template puts after it
    if lexicon == "natural":
        return _natural(leaf, context, question)
    return _reference(leaf, context.split(), question.split())


def facts(lexicon: str, context: str) -> dict[str, list[str]]:
    """Values of every key of a needle task, in order of appearance."""
    found: dict[str, list[str]] = defaultdict(list)
    if lexicon == "natural":
        for _, key, value in NEEDLE.findall(context):
            found[key].append(value)
        return found
    for statement in re.findall(r"\bnote ([^.]*) \.", context):
        words = statement.split()
        cut = 1 if len(words) == 3 else 2
        found[" ".join(words[:cut])].append(" ".join(words[cut:]))
    return found


def keys_asked(lexicon: str, question: str) -> list[str]:
    if lexicon == "natural":
        asked = re.search(r"magic \w+ for (.*?) mentioned", question)
        assert asked is not None
        return re.split(r", and |, ", asked[1])
    words = question.split()
    return words[1:-1] if words[0] == "each" else [" ".join(words[1:])]


def listed(text: str) -> list[str]:
    """The items of a numbered list on one line; an item can have spaces."""
    return re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", text)


def _natural(leaf: str, context: str, question: str) -> list[str]:
    if leaf.startswith("niah"):
        known = facts("natural", context)
        return [value for key in keys_asked("natural", question) for value in known[key]]
    body = context.rsplit("Memorize", 1)[-1]
    if leaf == "vt":
        wanted = re.search(r"value (\d+)", question)
        assert wanted is not None
        return _chain(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", body), wanted[1])
    if leaf == "cwe":
        return [word for word, _ in Counter(listed(body)).most_common(10)]
    body = context.split("coded words. ", 1)[1]
    counts = Counter(word for word in body.split() if word != "...")
    return [word for word, _ in counts.most_common(3)]


def _reference(leaf: str, context: list[str], question: list[str]) -> list[str]:
    if leaf.startswith("niah"):
        text, asked = " ".join(context), " ".join(question)
        known = facts("reference", text)
        return [value for key in keys_asked("reference", asked) for value in known[key]]
    if leaf == "vt":
        links = re.findall(r"\blet (\w+) (\w+) \.", " ".join(context))
        return _chain([(b, a) for a, b in links], question[1])
    return [word for word, _ in Counter(context).most_common(10 if leaf == "cwe" else 3)]


def _chain(links: list[tuple[str, str]], start: str) -> list[str]:
    """All variables that hold `start`, from pairs (variable, source)."""
    held, grown = [start], True
    while grown:
        more = [b for b, a in links if a in held and b not in held]
        grown = bool(more)
        held += more
    return held[1:]
