"""kvbench as a model of lmms-eval: real eviction behind lmms-eval's own command line.

`kvbench lmms-eval --model kvbench --model_args pretrained=ID,policy=snapkv,budget=0.2,moment=context --tasks ...` takes
every other argument of lmms-eval, and so does `python -m lmms_eval`, which finds the model by its entry point.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from kvbench.errors import UserError
from kvbench.harness.optional import LMMS_EVAL, provide_latex2sympy2

NAME = "kvbench"
"""Name of the model in lmms-eval."""


def manifest() -> Any:
    """Return the entry of lmms-eval's model registry: the value of the entry point `lmms_eval.models`."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id=NAME, chat_class_path="kvbench.lmms_eval.model.KVBenchLMM")


def run_lmms_eval(arguments: Sequence[str]) -> None:
    """Run lmms-eval's command line with one more model, `kvbench`.

    Args:
        arguments: Arguments of `lmms-eval`, without its name.

    Raises:
        UserError: lmms-eval is not installed, or the model refuses its arguments or a task.
    """
    if importlib.util.find_spec("lmms_eval") is None:
        raise UserError(f"lmms-eval is not installed; run `make vision`, or: {LMMS_EVAL}")
    provide_latex2sympy2()
    import lmms_eval.__main__ as command
    from lmms_eval.cli.dispatch import main
    from lmms_eval.models import MODEL_REGISTRY_V2

    MODEL_REGISTRY_V2.register_manifest(manifest(), overwrite=True)
    evaluate_single = command.cli_evaluate_single

    def refusing(*settings: Any) -> Any:
        try:
            return evaluate_single(*settings)
        except UserError as error:
            # lmms-eval would print a traceback and exit with status 0.
            raise SystemExit from error

    command.cli_evaluate_single = refusing
    sys.argv = ["lmms-eval", *arguments]
    try:
        main()
    except SystemExit as exit_error:
        if isinstance(exit_error.__cause__, UserError):
            raise exit_error.__cause__ from None
        raise
    finally:
        command.cli_evaluate_single = evaluate_single
