"""Owns what the many-token kernels are compiled for, and the memory that they take.  It must not know `cutlass`.

Everything here is a pure function of numbers, so a planner can read it without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.codebooks.summed_halves import MCG, ThreeInst
from trellis_format.rates import Rate
from trellis_kernels.cute.keys import VALUE_BYTES, KernelKey
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, PANEL_ROW_BYTES, quarter_share
from trellis_kernels.errors import KernelTypeError, KernelUnsupportedError, KernelValueError

__all__ = [
    "ARITHMETIC_CODEBOOKS",
    "BLOCK_ROWS_MOST",
    "ENTRY_WORDS",
    "EPILOGUES",
    "GEMM_ARCH",
    "ROW_UNIT",
    "SHARED_LIMIT",
    "PrefillGemmKey",
    "PrefillImageKey",
    "PrefillReduceKey",
    "PrefillScheduleKey",
    "block_capacity",
    "image_nbytes",
]

ARITHMETIC_CODEBOOKS = (ThreeInst.name, MCG.name, Mul1.name)
"""Codebooks whose law takes no table, for which the loop has no shared memory."""
BLOCK_ROWS_MOST = 128
"""Token rows of a block: the columns of one `wgmma`."""
ROW_UNIT = 32
"""Rows in which blocks are cut; the product of a block is that many columns wide at a time."""
GEMM_ARCH = "sm_90a"
"""The compile target that has `wgmma`."""
ENTRY_WORDS = 4
"""32-bit words of a row block: expert, first slot, rows, first row of the image."""
EPILOGUES = ("rows", "down", "join")
"""What becomes of the sums: `rows` as they are; `down` rotated out; `join` activated and rotated in."""

SHARED_LIMIT = 232_448 - 1024
"""Shared memory of a thread block on sm_90, in bytes, without what the system keeps."""

_ALIGNMENT = 1024  # of a row tile, the period of its swizzle
_BARRIER_BYTES = 16  # of a stage: full and empty
_MOST_STAGES = 8
_SUM_PITCH = BLOCK_CHANNELS + 4
_WARPGROUPS = 2


def block_capacity(slots: int, num_experts: int) -> int:
    """Row blocks that always suffice for that many slots."""
    return -(-slots // BLOCK_ROWS_MOST) + num_experts


def image_nbytes(slots: int, channels: int) -> int:
    """Bytes of the fp16 image of that many packed rows, channels a multiple of 64."""
    return slots * channels * 2


def _check_member(what: str, value: object, known: tuple[object, ...] | dict[str, int]) -> None:
    if value not in known:
        raise KernelValueError(f"{what} {value!r} is not one of {', '.join(map(str, known))}")


@dataclass(frozen=True)
class PrefillGemmKey(KernelKey):
    """The many-row grouped GEMM.

    Args:
        arch: compile target with `wgmma`.
        codebook: name of the codebook.
        half_bits: the rates as integers 2K: of the one linear, or of gate and up.
        epilogue: one of `EPILOGUES`.
        activation: the law of `join`, else None.
        joint_inputs: whether gate and up multiply the same rows.
        biased: whether a bias is added where the output rotation ends, by linear.
        out_dtype: of `rows` and `down`; `join` writes a float16 image.

    Raises:
        FormatValueError: if the codebook is unknown or a rate not legal for it.
        KernelUnsupportedError: if the codebook's law needs a table.
        KernelTypeError, KernelValueError: if the parts do not fit each other.
    """

    kernel: ClassVar[str] = "prefill_gemm"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_gemm"

    codebook: str
    half_bits: tuple[int, ...]
    epilogue: str = "rows"
    activation: Activation | None = None
    joint_inputs: bool = False
    biased: tuple[bool, ...] = (False,)
    out_dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch != GEMM_ARCH:
            raise KernelValueError(f"the many-row GEMM needs wgmma: architecture {self.arch!r} is not {GEMM_ARCH}")
        for half_bits in self.half_bits:
            get_codebook(self.codebook).check_rate(Rate(half_bits))
        if self.codebook not in ARITHMETIC_CODEBOOKS:
            raise KernelUnsupportedError(
                f"the many-row GEMM has no table of codebook {self.codebook}; "
                f"without one: {', '.join(ARITHMETIC_CODEBOOKS)}"
            )
        _check_member("epilogue", self.epilogue, EPILOGUES)
        _check_member("out_dtype", self.out_dtype, {"float16": 2, "float32": 4})
        if (self.activation is not None) != (self.epilogue == "join"):
            raise KernelTypeError(
                f"epilogue {self.epilogue!r} with activation {self.activation!r}: only join takes one"
            )
        linears = 2 if self.gated else 1
        if len(self.half_bits) != linears or len(self.biased) != linears:
            raise KernelValueError(
                f"{linears} linears take as many rates and bias flags, got {len(self.half_bits)} and {len(self.biased)}"
            )

    @property
    def gated(self) -> bool:
        """Whether the two warpgroups have a gate and an up block, rather than two blocks of one linear."""
        return self.activation is not None and self.activation.gated

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """The rate of each warpgroup."""
        return Rate(self.half_bits[0]), Rate(self.half_bits[-1])

    @property
    def images(self) -> int:
        """Images of rows that a step reads."""
        return 2 if self.gated and not self.joint_inputs else 1

    @property
    def row_stage_bytes(self) -> int:
        """Bytes of a stage's row tiles."""
        return self.images * BLOCK_ROWS_MOST * PANEL_ROW_BYTES

    @property
    def code_stage_bytes(self) -> int:
        """Bytes of a stage's codes, of both warpgroups."""
        return sum(quarter_share(rate).step_bytes for rate in self.rates)

    @property
    def sum_bytes(self) -> int:
        """Bytes of a warpgroup's staged sums: 32 rows of 128 channels, twice where branches meet."""
        return ROW_UNIT * _SUM_PITCH * 4 * (2 if self.gated else 1)

    @property
    def table_bytes(self) -> int:
        """Bytes of a warpgroup's tables: output scales, input scales and biases of its 128 channels, fp32."""
        return (2 + any(self.biased)) * BLOCK_CHANNELS * 4 if self.epilogue == "join" else 0

    @property
    def stages(self) -> int:
        """Steps in flight."""
        work = _WARPGROUPS * (self.sum_bytes + self.table_bytes)
        stage = self.row_stage_bytes + self.code_stage_bytes + _BARRIER_BYTES
        return min(_MOST_STAGES, (SHARED_LIMIT - _ALIGNMENT - work) // stage)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        stage = self.row_stage_bytes + self.code_stage_bytes + _BARRIER_BYTES
        return self.stages * stage + _WARPGROUPS * (self.sum_bytes + self.table_bytes)

    def __str__(self) -> str:
        rates = "/".join(str(Rate(half_bits)) for half_bits in self.half_bits)
        law = f" {self.activation.kind}" if self.activation else ""
        images = f" images={self.images}" if self.gated else ""
        return f"{self.kernel} {self.arch} {self.codebook} K={rates} {self.epilogue}{law}{images} {self.out_dtype}"


@dataclass(frozen=True)
class PrefillImageKey(KernelKey):
    """The kernel that gathers rows by route, rotates them, and writes their image.

    Args:
        arch: compile target.
        in_dtype: of the rows.
        images: 0 writes the rows as they are; 1 or 2 scales and rotates them for that many linears.

    Raises:
        KernelValueError: if a value is not one of those.
    """

    kernel: ClassVar[str] = "prefill_image"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_image"

    in_dtype: str
    images: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("in_dtype", self.in_dtype, VALUE_BYTES)
        _check_member("images", self.images, (0, 1, 2))

    def __str__(self) -> str:
        return f"{self.kernel} {self.arch} {self.in_dtype} images={self.images}"


@dataclass(frozen=True)
class PrefillReduceKey(KernelKey):
    """The kernel that sums each token's float16 route rows.

    Args:
        arch: compile target.
        weight_dtype: of the route weights.
        out_dtype: of the results.

    Raises:
        KernelValueError: if a dtype is unknown.
    """

    kernel: ClassVar[str] = "prefill_reduce"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_reduce"

    weight_dtype: str
    out_dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("weight_dtype", self.weight_dtype, VALUE_BYTES)
        _check_member("out_dtype", self.out_dtype, VALUE_BYTES)

    def __str__(self) -> str:
        return f"{self.kernel} {self.arch} {self.weight_dtype}->{self.out_dtype}"


@dataclass(frozen=True)
class PrefillScheduleKey(KernelKey):
    """The kernel that cuts the segments of packed routes into row blocks."""

    kernel: ClassVar[str] = "prefill_schedule"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_schedule"

    def __str__(self) -> str:
        return f"{self.kernel} {self.arch}"
