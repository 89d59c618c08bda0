"""How the numbers of a block become codes, a scale and a zero: KIVI's rounding, hqq or quanto.

`kvbench.engine.codes` decides what a block is: numbers of one channel of neighbouring keys, or
neighbouring channels of one value. A quantizer gets blocks as rows, so that the axes are the same
for all, and gives back what it would store itself. hqq and optimum-quanto are optional, and are
imported when a policy with `quantizer=` first quantises.
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
    """Blocks as codes.

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
        package: What must be installed, as pip names it; "" for nothing.
        module: What is imported of it.
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
        """The numbers of blocks, `[n, m]`, in the dtype of the cache."""


class Kivi(BlockQuantizer):
    """Round to even steps from the smallest to the largest number: `zero + code * scale`."""

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        numbers = blocks.float()
        low, high = numbers.amin(1), numbers.amax(1)
        most = (1 << bits) - 1
        scale, zero = ((high - low) / most).to(blocks.dtype), low.to(blocks.dtype)
        step = scale.float()[:, None]
        code = (numbers - zero.float()[:, None]) / torch.where(step > 0, step, 1.0)
        return Codes(code.round().clamp(0, most).to(torch.uint8), scale, zero)

    def decode(self, codes: Codes) -> Tensor:
        numbers = codes.code.float() * codes.scale.float()[:, None] + codes.zero.float()[:, None]
        return numbers.to(codes.scale.dtype)


class Hqq(BlockQuantizer):
    """Half-quadratic quantisation (Badri, Shaji, 2023): `(code - zero) * scale`.

    Its solver moves the zeros until the mean error of all blocks of a call stops falling.
    """

    package = "hqq"
    module = "hqq"
    joint = True

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        from hqq.core.quantize import Quantizer  # an optional package

        code, meta = Quantizer.quantize(
            blocks, nbits=bits, group_size=blocks.shape[1], axis=1, device=blocks.device,
            compute_dtype=blocks.dtype, bitpack=False,
        )  # fmt: skip
        scale, zero = (meta[name].flatten().to(blocks.dtype) for name in ("scale", "zero"))
        return Codes(code.to(torch.uint8), scale, zero)

    def decode(self, codes: Codes) -> Tensor:
        from hqq.core.quantize import Quantizer  # an optional package

        meta = {
            "compute_dtype": codes.scale.dtype,
            "packing": None,
            "scale": codes.scale[:, None],
            "zero": codes.zero[:, None],
            "shape": codes.code.shape,
        }
        numbers: Tensor = Quantizer.dequantize(codes.code, meta)
        return numbers


class Quanto(BlockQuantizer):
    """optimum-quanto with its `MaxOptimizer`, as in transformers: `code * scale - zero`.

    `dequantize` of its packed tensors would compile an extension, so the formula is written here.
    """

    package = "optimum-quanto"
    module = "optimum.quanto"

    def encode(self, blocks: Tensor, bits: int) -> Codes:
        from optimum.quanto import MaxOptimizer, qint2, qint4  # an optional package

        kind: Any = {2: qint2, 4: qint4}[bits]
        scale, shift = MaxOptimizer().optimize(blocks, kind, 0)
        code = torch.ops.quanto.quantize_affine(
            blocks, bits=bits, axis=0, group_size=None, scale=scale, shift=shift
        )
        # Equal numbers have a scale of 0, and what their codes are then is left to the device.
        code = code.clamp(max=(1 << bits) - 1)
        return Codes(code, scale.flatten(), shift.flatten())

    def decode(self, codes: Codes) -> Tensor:
        return codes.code * codes.scale[:, None] - codes.zero[:, None]


QUANTIZERS: dict[str, BlockQuantizer] = {"kivi": Kivi(), "hqq": Hqq(), "quanto": Quanto()}
"""By the name that `quantizer=` takes."""


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # `optimum` itself is missing
        return False


def check_quantizer(policy: Policy) -> None:
    """Check that the package that quantises the caches of a policy is installed.

    Raises:
        UserError: It is not; the message says how to install it.
    """
    needed = QUANTIZERS[policy.quantizer]
    if needed.package and not _is_installed(needed.module):
        raise UserError(
            f"{policy}: quantizer={policy.quantizer} needs {needed.package}, which is not "
            "installed; run pip install 'kvbench[quantizers]'"
        )


def quantizer_packages(policy: Policy) -> list[str]:
    """Packages whose versions decide what the caches of a policy hold."""
    package = QUANTIZERS[policy.quantizer].package
    return [package] if package else []
