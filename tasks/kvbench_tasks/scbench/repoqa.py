"""RepoQA (arXiv:2406.06025), as SCBench scores it: which function does a response repeat?"""

from __future__ import annotations

import ast
import re
import warnings

_BLOCK = re.compile(r"^```\w*[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def extract(response: str, language: str) -> str:
    """The code in a response.

    In Python, the first function of the first fenced block that has a function; in other languages,
    for which there is no parser here, the first fenced block. A response without a block counts as
    a whole.
    """
    blocks = _BLOCK.findall(response.strip())
    if language == "python":
        for block in blocks:
            if found := _first_function(block):
                return found
    return blocks[0] if blocks else response.strip()


def _first_function(code: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in what a model wrote
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    if not found:
        return ""
    first = min(found, key=lambda node: node.lineno)
    return ast.get_source_segment(code, first) or ""


def similarity(candidate: str, reference: str) -> float:
    """Smoothed BLEU of the words of two texts, 0 to 1."""
    # nltk takes seconds to import
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    said, wanted = re.split(r"\s+", candidate.strip()), re.split(r"\s+", reference.strip())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about texts with no words in common
        return float(sentence_bleu([wanted], said, smoothing_function=SmoothingFunction().method4))
