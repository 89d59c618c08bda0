"""RepoQA (arXiv:2406.06025), as SCBench scores it: which function does a response repeat?"""

from __future__ import annotations

import ast
import re
import warnings

_BLOCK = re.compile(r"^```\w*[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


def extract(response: str, language: str) -> str:
    """Extract the code from a response.

    For Python, this is the first function of the first fenced block with a function; for other languages, which are not
    parsed, the first fenced block. Without a block, it is the whole response.
    """
    blocks = _BLOCK.findall(response.strip())
    if language == "python":
        for block in blocks:
            if function_code := _first_function(block):
                return function_code
    return blocks[0] if blocks else response.strip()


def _first_function(code: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes in model-written code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    function_types = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for node in ast.walk(tree) if isinstance(node, function_types)]
    if not functions:
        return ""
    first_function = min(functions, key=lambda node: node.lineno)
    return ast.get_source_segment(code, first_function) or ""


def similarity(candidate: str, reference: str) -> float:
    """Return the smoothed BLEU over words of two texts, 0 to 1."""
    # Imported here, because nltk takes seconds to load.
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    candidate_words, reference_words = (
        re.split(r"\s+", candidate.strip()),
        re.split(r"\s+", reference.strip()),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts without common words
        return float(sentence_bleu([reference_words], candidate_words, smoothing_function=SmoothingFunction().method4))
