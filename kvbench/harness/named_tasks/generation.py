"""`generation_kwargs` of lm-eval's tasks: what kvbench follows, and a refusal of what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from kvbench.errors import UserError, nearest

_FOLLOWED = ("until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k")
_WITHOUT_EFFECT = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "repetition_penalty": 1,
    "length_penalty": 1,
    "use_cache": True,
}
"""Values of other settings that change no answer; None changes none either."""


def generation_settings(kwargs: Mapping[str, Any], task_name: str, max_tokens: int = 256) -> dict[str, Any]:
    """Return the settings of a generation as lm-eval normalises them, with `until`, `max_gen_toks` and `do_sample`.

    Args:
        kwargs: `generation_kwargs` of a request.
        task_name: The task, for messages.
        max_tokens: Tokens of an answer if the task does not say.

    Raises:
        UserError: A number or a stop string is none, or a setting would change answers and is not followed.
    """
    try:
        settings = dict(normalize_gen_kwargs(dict(kwargs), max_tokens))
    except (TypeError, ValueError) as error:
        raise UserError(f"{task_name}: generation_kwargs: {error}") from None
    for text in settings["until"]:
        if not isinstance(text, str | None):
            raise UserError(f"{task_name}: generation_kwargs: until must be text or a list of texts, not {text!r}")
    settings["until"] = [text for text in settings["until"] if text is not None]
    for name, value in settings.items():
        if name not in _FOLLOWED and value is not None and value != _WITHOUT_EFFECT.get(name):
            raise UserError(
                f"{task_name}: generation_kwargs: {name}={value} is not followed{nearest(name, _FOLLOWED)}; "
                f"there are {', '.join(_FOLLOWED)}"
            )
    return settings
