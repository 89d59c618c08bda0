"""`kvbench lm-eval` and `kvbench lmms-eval`: the command lines of lm-eval and lmms-eval, with eviction."""

from __future__ import annotations

import typer


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command line with one more model: --model kvbench.

    Its --model_args are pretrained, policy, budget, moment and context (docs/harnesses.md); all else is lm-eval's.
    """
    from kvbench.lm_eval import run_lm_eval

    run_lm_eval(context.args)


def lmms_eval(context: typer.Context) -> None:
    """Run lmms-eval's own command line with one more model: --model kvbench.

    Its --model_args are pretrained, policy, budget and moment (docs/harnesses.md); all else is lmms-eval's.
    """
    from kvbench.lmms_eval import run_lmms_eval

    run_lmms_eval(context.args)
