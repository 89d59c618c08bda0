"""Weight quantisation schemes applied at loading. Imports nothing heavy."""

from __future__ import annotations

from kvbench.errors import unknown

PACKAGES: dict[str, str] = {
    "bnb-4bit": "bitsandbytes",
    "bnb-8bit": "bitsandbytes",
    "torchao-int8": "torchao",
}
"""Schemes that quantise weights at loading, and the package that each needs.

`bnb-4bit` is NF4 and computes in the model's dtype; `bnb-8bit` is LLM.int8() and computes in float16 and int8;
`torchao-int8` stores weights as int8 and computes in the model's dtype.
"""


def scheme_name(value: object) -> str:
    """Validate the name of a scheme.

    Raises:
        UserError: There is no such scheme.
    """
    if not isinstance(value, str) or value not in PACKAGES:
        raise unknown("quantization", value, PACKAGES)
    return str(value)
