"""Whether the Hugging Face hub can be reached; apart from its caches, because those import `datasets`."""

from __future__ import annotations

import functools

from huggingface_hub import constants, get_session


@functools.cache
def unreachable() -> str:
    """Return why the hub cannot be used (to complete "the hub ..."), or ""; tried once, for five seconds."""
    if constants.HF_HUB_OFFLINE:
        return "is not contacted because HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception as error:  # any error means that there is no hub
        return f"cannot be reached ({type(error).__name__} at {constants.ENDPOINT})"
    return ""
