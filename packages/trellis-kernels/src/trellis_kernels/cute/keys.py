"""Owns compile keys: frozen records of all that a kernel generator reads.  It must not know `cutlass` or tensors.

Two launches with equal keys run the same binary.  A key's repr evaluates back to an equal key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trellis_format.codebooks import STATES, get_codebook
from trellis_format.rates import Rate
from trellis_kernels.arguments import check_table
from trellis_kernels.cute.archs import get_arch
from trellis_kernels.errors import KernelValueError

__all__ = ["VALUE_BYTES", "DecodeKey", "KernelKey"]

VALUE_BYTES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of one value of each dtype that a kernel can write."""


@dataclass(frozen=True)
class KernelKey:
    """What every kernel is compiled for.

    Args:
        arch: compile target, a key of `ARCHS`.

    Raises:
        KernelValueError: if the target is unknown.
    """

    kernel: ClassVar[str] = ""
    """Name of the kernel in reports."""
    module: ClassVar[str] = ""
    """Module with `build(key, options)`, which compiles the kernel and launches nothing."""

    arch: str

    def __post_init__(self) -> None:
        get_arch(self.arch)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory that a launch asks for on top of what the binary declares, in bytes per block."""
        return 0


@dataclass(frozen=True)
class DecodeKey(KernelKey):
    """The kernel that writes tiles as a matrix.

    Args:
        arch: compile target.
        codebook: name of the codebook.
        half_bits: the rate as the integer 2K.
        out_dtype: `float16` (exact), `bfloat16` (one more rounding) or `float32` (exact).
        table: form of the codebook's table, `compact` or `full`; both give the same bits.

    Raises:
        FormatValueError: if the codebook is unknown or 2K is not legal for it.
        KernelValueError: if the target, the dtype or the form is unknown, or a full table is asked for that there is
            not.
    """

    kernel: ClassVar[str] = "decode"
    module: ClassVar[str] = "trellis_kernels.cute.decode"

    codebook: str
    half_bits: int
    out_dtype: str
    table: str = "compact"

    def __post_init__(self) -> None:
        super().__post_init__()
        get_codebook(self.codebook).check_rate(Rate(self.half_bits))
        check_table(self.table, self.codebook, Rate(self.half_bits))
        if self.out_dtype not in VALUE_BYTES:
            raise KernelValueError(f"decode cannot write {self.out_dtype!r}; known dtypes: {', '.join(VALUE_BYTES)}")

    @property
    def rate(self) -> Rate:
        """The rate K."""
        return Rate(self.half_bits)

    def __str__(self) -> str:
        form = "" if self.table == "compact" else f" {self.table} table"
        return f"{self.kernel} {self.arch} {self.codebook} K={self.rate} {self.out_dtype}{form}"

    @property
    def dynamic_shared_bytes(self) -> int:
        return STATES if self.table == "full" else 0
