"""Owns the list of kernel specialisations that are compiled ahead of time.  It must not know `cutlass`.

The list derives from the codebooks of trellis-format and the architectures here, so that neither can be forgotten.
"""

from __future__ import annotations

from trellis_format.codebooks import CODEBOOKS
from trellis_kernels.cute.archs import get_arch
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey, KernelKey
from trellis_kernels.cute.op_keys import op_keys

__all__ = ["WITHOUT_DEVICE_DECODE", "decode_keys", "registered_keys"]

WITHOUT_DEVICE_DECODE = {
    "lut_e4m3": "its 4 KiB table needs shared memory, which no kernel here sets aside",
    "lut_fp16": "its 416-byte table needs shared memory, which no kernel here sets aside",
}
"""Codebooks that kernels do not decode, with the reason; every other one must have a device side."""


def registered_keys(arch: str) -> tuple[KernelKey, ...]:
    """Every specialisation of every kernel for one compile target, in a fixed order.

    Raises:
        KernelValueError: if the target is unknown.
    """
    return (*decode_keys(arch), *op_keys(arch))


def decode_keys(arch: str) -> tuple[DecodeKey, ...]:
    """The decode kernel for every codebook with a device side, every rate that it is legal for, and every output dtype.

    Raises:
        KernelValueError: if the target is unknown.
    """
    get_arch(arch)
    return tuple(
        DecodeKey(arch=arch, codebook=codebook.name, half_bits=rate.half_bits, out_dtype=dtype)
        for codebook in CODEBOOKS.values()
        if codebook.name not in WITHOUT_DEVICE_DECODE
        for rate in codebook.legal_rates
        for dtype in VALUE_BYTES
    )
