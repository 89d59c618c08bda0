"""Block quantizers, which turn a block into codes, a scale and a zero: KIVI's rounding, hqq or quanto.

`kvbench.engine.codes` defines the blocks: numbers of one channel of neighbouring keys, or neighbouring channels of one
value. A quantizer gets blocks as rows, so all use the same axes, and returns what it would store itself. hqq and
optimum-quanto are optional and are imported when a policy with `quantizer=` first quantises.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import UserError
from kvbench.plugin import Policy


class Codes(NamedTuple):
    """Encoded blocks.

    Attributes:
        code: uint8 `[n, m]`, below `2 ** bits`.
        scale, zero: `[n]` each, in the dtype of the cache.
    """

    code: Tensor
    scale: Tensor
    zero: Tensor


class BlockQuantizer(ABC):
    """Encodes and decodes blocks.

    Attributes:
        package: Required package, as pip names it; "" for none.
        module: Module to import from it.
        joint: Whether the codes of a block depend on the other blocks of the same call.
    """

    package: ClassVar[str] = ""
    module: ClassVar[str] = ""
    joint: ClassVar[bool] = False

    @abstractmethod
    def encode(self, blocks: Tensor, bits: int) -> Codes:
        """Quantise blocks `[n, m]` in the dtype of the cache."""

    @abstractmethod
    def decode(self, codes: Codes) -> Tensor:
        """Decode blocks to numbers `[n, m]` in the dtype of the cache."""


class Kivi(BlockQuantizer):
    """Rounding to even steps between the minimum and maximum: `zero + code * scale`."""

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        numbers = blocks.float()
        minimum, maximum = numbers.amin(1), numbers.amax(1)
        largest_code = (1 << bits) - 1
        scale, zero_point = ((maximum - minimum) / largest_code).to(blocks.dtype), minimum.to(blocks.dtype)
        step_size = scale.float()[:, None]
        code_values = (numbers - zero_point.float()[:, None]) / torch.where(step_size > 0, step_size, 1.0)
        return Codes(code_values.round().clamp(0, largest_code).to(torch.uint8), scale, zero_point)

    def decode(self, codes: Codes) -> Tensor:
        decoded = codes.code.float() * codes.scale.float()[:, None] + codes.zero.float()[:, None]
        return decoded.to(codes.scale.dtype)


class Hqq(BlockQuantizer):
    """Half-quadratic quantisation (Badri, Shaji, 2023): `(code - zero) * scale`.

    Its solver moves the zeros until the mean error over all blocks of a call stops decreasing.
    """

    package = "hqq"
    module = "hqq"
    joint = True

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        from hqq.core.quantize import Quantizer  # an optional package

        code_values, metadata = Quantizer.quantize(
            blocks, nbits=bits, group_size=blocks.shape[1], axis=1, device=blocks.device,
            compute_dtype=blocks.dtype, bitpack=False,
        )  # fmt: skip
        scale, zero_point = (metadata[field_name].flatten().to(blocks.dtype) for field_name in ("scale", "zero"))
        return Codes(code_values.to(torch.uint8), scale, zero_point)

    def decode(self, codes: Codes) -> Tensor:
        from hqq.core.quantize import Quantizer  # an optional package

        metadata = {
            "compute_dtype": codes.scale.dtype,
            "packing": None,
            "scale": codes.scale[:, None],
            "zero": codes.zero[:, None],
            "shape": codes.code.shape,
        }
        decoded: Tensor = Quantizer.dequantize(codes.code, metadata)
        return decoded


class Quanto(BlockQuantizer):
    """optimum-quanto with its `MaxOptimizer`, as in transformers: `code * scale - zero`.

    `dequantize` of its packed tensors would compile an extension, so the formula is implemented here.
    """

    package = "optimum-quanto"
    module = "optimum.quanto"

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        from optimum.quanto import MaxOptimizer, qint2, qint4  # an optional package

        quant_type: Any = {2: qint2, 4: qint4}[bits]
        scale, zero_shift = MaxOptimizer().optimize(blocks, quant_type, 0)
        code_values = torch.ops.quanto.quantize_affine(
            blocks, bits=bits, axis=0, group_size=None, scale=scale, shift=zero_shift
        )
        # Equal numbers have a scale of 0, for which the codes depend on the device.
        code_values = code_values.clamp(max=(1 << bits) - 1)
        return Codes(code_values, scale.flatten(), zero_shift.flatten())

    def decode(self, codes: Codes) -> Tensor:
        return codes.code * codes.scale[:, None] - codes.zero[:, None]


QUANTIZERS: dict[str, BlockQuantizer] = {"kivi": Kivi(), "hqq": Hqq(), "quanto": Quanto()}
"""Quantizers by the name used in `quantizer=`."""


def _is_installed(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # `optimum` itself is missing
        return False


def check_quantizer(policy: Policy) -> None:
    """Check that the quantizer package of a policy is installed.

    Raises:
        UserError: It is missing; the message says how to install it.
    """
    quantizer = QUANTIZERS[policy.quantizer]
    if quantizer.package and not _is_installed(quantizer.module):
        raise UserError(
            f"{policy}: quantizer={policy.quantizer} needs {quantizer.package}, which is not installed; "
            "run pip install 'kvbench[quantizers]'"
        )


def quantizer_packages(policy: Policy) -> list[str]:
    """Return the packages whose versions affect the cache contents of a policy."""
    package = QUANTIZERS[policy.quantizer].package
    return [package] if package else []
