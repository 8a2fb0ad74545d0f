"""Owns the list of kernel specialisations that are compiled ahead of time.  It must not know `cutlass`.

The list derives from the codebooks of trellis-format and the architectures here, so that neither can be forgotten.
"""

from __future__ import annotations

from trellis_format.codebooks import CODEBOOKS
from trellis_kernels.arguments import FULL_TABLE_CODEBOOK, FULL_TABLE_RATE, TABLES
from trellis_kernels.cute.archs import get_arch
from trellis_kernels.cute.keys import VALUE_BYTES, DecodeKey, KernelKey
from trellis_kernels.cute.moe_registry import moe_small_keys
from trellis_kernels.cute.op_keys import op_keys
from trellis_kernels.cute.prefill_key import prefill_keys

__all__ = ["decode_keys", "registered_keys"]


def registered_keys(arch: str) -> tuple[KernelKey, ...]:
    """The specialisations of every kernel for one compile target, in a fixed order.

    Of decoding and the ops around the GEMM that is every one, of fused layers those that stand for the others.

    Raises:
        KernelValueError: if the target is unknown.
    """
    return (*decode_keys(arch), *op_keys(arch), *prefill_keys(arch), *moe_small_keys(arch))


def decode_keys(arch: str) -> tuple[DecodeKey, ...]:
    """The decode kernel for every codebook, every rate that it is legal for, every output dtype, and every table.

    Raises:
        KernelValueError: if the target is unknown.
    """
    get_arch(arch)
    return tuple(
        DecodeKey(arch=arch, codebook=codebook.name, half_bits=rate.half_bits, out_dtype=dtype, table=table)
        for codebook in CODEBOOKS.values()
        for rate in codebook.legal_rates
        for dtype in VALUE_BYTES
        for table in TABLES
        if table == "compact" or (codebook.name, rate) == (FULL_TABLE_CODEBOOK, FULL_TABLE_RATE)
    )
