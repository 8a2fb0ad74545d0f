"""Owns what the few-row kernels of one linear are compiled for, and how they share it out.  It must not know `cutlass`.

The cut of the input channels follows from the linear and the device, never from the rows, so that a row's sums have one
order whatever rows are beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trellis_format.codebooks import EXL3_CODEBOOKS, get_codebook
from trellis_format.extent import BLOCK
from trellis_format.rates import Rate
from trellis_kernels.cute.keys import VALUE_BYTES, KernelKey
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError

__all__ = ["MOST_ROWS", "SHARE_BLOCKS", "LinearKey", "choose_share"]

MOST_ROWS = 8
"""Rows that one matrix product takes, and so the most of a launch."""
SHARE_BLOCKS = (2, 4, 8, 16, 32)
"""Blocks of 128 input channels that a thread block may take; their rotated rows lie in its shared memory."""
_FILL = 2  # thread blocks for each multiprocessor, where the linear has that many


@dataclass(frozen=True)
class LinearKey(KernelKey):
    """The kernels that apply one linear to few rows.

    Args:
        arch: compile target.
        codebook: name of the codebook, one of those of arithmetic alone.
        half_bits: the rate as the integer 2K.
        n: stored output channels.
        x_dtype: of x, `float16`, `bfloat16` or `float32`.
        out_dtype: of the result, likewise.
        biased: whether there is a bias.
        share_blocks: input blocks of a thread block, one of `SHARE_BLOCKS`.
        slices: warps that share a strip of 64 output channels.
        stages: steps of 64 input channels whose codes are in flight in a warp.

    Raises:
        FormatValueError: if 2K is not legal for the codebook.
        KernelUnsupportedError: if the codebook has a table.
        KernelValueError: if another value is not legal.
    """

    kernel: ClassVar[str] = "linear_few"
    module: ClassVar[str] = "trellis_kernels.cute.linear_few"

    codebook: str
    half_bits: int
    n: int
    x_dtype: str
    out_dtype: str
    biased: bool
    share_blocks: int
    slices: int = 4
    stages: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        get_codebook(self.codebook).check_rate(Rate(self.half_bits))
        if self.codebook not in EXL3_CODEBOOKS:
            raise KernelUnsupportedError(
                f"codebook {self.codebook} is decoded with a table; few rows take {', '.join(EXL3_CODEBOOKS)}"
            )
        if self.n < BLOCK or self.n % BLOCK:
            raise KernelValueError(f"n {self.n} is not a positive multiple of {BLOCK}")
        for name in ("x_dtype", "out_dtype"):
            if getattr(self, name) not in VALUE_BYTES:
                raise KernelValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(VALUE_BYTES)}")
        if self.share_blocks not in SHARE_BLOCKS:
            raise KernelValueError(f"share_blocks {self.share_blocks} is not one of {SHARE_BLOCKS}")
        if not 1 <= self.slices <= 2 * self.share_blocks or self.stages < 1:
            raise KernelValueError(
                f"{self.slices} slices and {self.stages} stages: a share has {2 * self.share_blocks} steps, and a warp "
                "needs one stage"
            )

    def split(self, k: int) -> int:
        """Thread blocks that share the input channels."""
        return -(-(k // BLOCK) // self.share_blocks)

    def __str__(self) -> str:
        dtypes = f"{self.x_dtype}->{self.out_dtype}"
        return (
            f"{self.kernel} {self.arch} {self.codebook} K={Rate(self.half_bits)} n={self.n} {dtypes} "
            f"share {self.share_blocks}"
        )


def choose_share(k: int, n: int, multiprocessors: int) -> int:
    """Input blocks of a thread block: as many as leave every multiprocessor of the device two thread blocks.

    Args:
        k: stored input channels.
        n: stored output channels.
        multiprocessors: of the device.
    """
    for share in reversed(SHARE_BLOCKS):
        shares = -(-(k // BLOCK) // share)
        if n // BLOCK * shares >= _FILL * multiprocessors:
            return share
    return SHARE_BLOCKS[0]
