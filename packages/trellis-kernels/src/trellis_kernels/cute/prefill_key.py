"""Owns what the many-token kernels are compiled for, and the memory that they take.  It must not know `cutlass`.

Everything here is a pure function of numbers, so a planner can read it without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.codebooks.lut_e4m3 import LutE4M3
from trellis_format.codebooks.lut_fp16 import LutFp16
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.codebooks.summed_halves import MCG, ThreeInst
from trellis_format.rates import Rate
from trellis_kernels.cute.keys import VALUE_BYTES, KernelKey
from trellis_kernels.cute.prefill_share import BLOCK_CHANNELS, PANEL_ROW_BYTES, column_share
from trellis_kernels.errors import KernelTypeError, KernelValueError

__all__ = [
    "BLOCK_ROWS_MOST",
    "CODE_UNIT",
    "ENGINES",
    "ENTRY_CODES",
    "ENTRY_WORDS",
    "EPILOGUES",
    "FEEDER_WARPS",
    "GEMM_ARCH",
    "HALF_SHARED_LIMIT",
    "INFO_HEADER_BYTES",
    "INFO_TABLE_BYTES",
    "LEAST_SHARED_LIMIT",
    "MIDDLE_ROWS_MOST",
    "MIDDLE_WIDTH_MOST",
    "ROW_UNIT",
    "SHARED_LIMIT",
    "SHORT_ROWS_MOST",
    "STASH_NBYTES",
    "TABLE_BYTES",
    "THREAD_BLOCKS_MOST",
    "GemmKey",
    "PrefillGemmKey",
    "PrefillImageKey",
    "PrefillMiddleKey",
    "PrefillMmaKey",
    "PrefillReduceKey",
    "PrefillScheduleKey",
    "PrefillShortKey",
    "block_capacity",
    "engine_for",
    "engines_for",
    "image_nbytes",
    "info_table",
    "prefill_keys",
]

TABLE_BYTES = {LutE4M3.name: 8192, LutFp16.name: 512}
"""Shared memory of the table of each codebook whose law takes one."""
BLOCK_ROWS_MOST = 256
"""Token rows of a block: the columns of one `wgmma`."""
ROW_UNIT = 32
"""Rows in which blocks are cut; the product of a block is that many columns wide at a time."""
FEEDER_WARPS = 4
"""Warps beside those that multiply, of which `PrefillGemmKey.feeders` fill stages; registers are handed over between
whole warpgroups."""
GEMM_ARCH = "sm_90a"
"""The compile target that has `wgmma`."""
ENTRY_WORDS = 8
"""32-bit words of a row block: expert, first slot, rows, first row of the image; from `ENTRY_CODES` on where the codes
of each linear start, in units of `CODE_UNIT`."""
ENTRY_CODES = 4
"""Place of the first of them in a row block."""
CODE_UNIT = 16
"""Bytes in which row blocks say where codes start."""
EPILOGUES = ("rows", "down", "add", "join")
"""What becomes of the sums: `rows` as they are; `down` rotated out; `add` that, weighted, rounded and added to the row
of the token by atomic additions; `join` activated and rotated in."""

SHARED_LIMIT = 232_448 - 1024
"""Shared memory of a thread block on sm_90, in bytes, without what the system keeps."""
HALF_SHARED_LIMIT = 233_472 // 2 - 1024
"""The same where two thread blocks share a multiprocessor."""

_ALIGNMENT = 1024  # of a row tile, the period of its swizzle
_BARRIER_BYTES = 16  # of a stage: full and empty
_SUM_PITCH = BLOCK_CHANNELS + 4
_LINEARS = 2

INFO_HEADER_BYTES = 128
"""Bytes of a tile's place: expert, first slot, rows, first row of the image, block of output channels."""
INFO_TABLE_BYTES = BLOCK_CHANNELS * 2
"""Bytes of a block's part of a float16 table."""
THREAD_BLOCKS_MOST = 144
"""Multiprocessors of the largest device that has `wgmma`, each of which has one thread block or more."""
LEAST_SHARED_LIMIT = 101_376 - 1024
"""Shared memory of a thread block on the targets that have the least, in bytes, without what the system keeps."""
STASH_NBYTES = THREAD_BLOCKS_MOST * BLOCK_ROWS_MOST * BLOCK_CHANNELS * 4
"""Bytes of the memory in which gate waits for up: a tile of float32 for each thread block."""

_INFO_ROUTES_BYTES = BLOCK_ROWS_MOST * 4
_INFO_BUFFERS = 2


def info_table(index: int) -> int:
    """Bytes from the start of a tile's information to its table `index`."""
    return INFO_HEADER_BYTES + _INFO_ROUTES_BYTES + index * INFO_TABLE_BYTES


def block_capacity(slots: int, num_experts: int, block_rows: int = BLOCK_ROWS_MOST) -> int:
    """Row blocks, of at most so many rows, that always suffice for that many slots."""
    return -(-slots // block_rows) + num_experts


def image_nbytes(slots: int, channels: int) -> int:
    """Bytes of the fp16 image of that many packed rows, channels a multiple of 64."""
    return slots * channels * 2


def _check_member(what: str, value: object, known: tuple[object, ...] | dict[str, int]) -> None:
    if value not in known:
        raise KernelValueError(f"{what} {value!r} is not one of {', '.join(map(str, known))}")


@dataclass(frozen=True)
class _GemmKey(KernelKey):
    """What both many-row grouped GEMMs are compiled for.

    Args:
        arch: compile target.
        codebook: name of the codebook.
        half_bits: the rates as integers 2K: of the one linear, or of gate and up.
        epilogue: one of `EPILOGUES`.
        activation: the law of `join`, else None.
        biased: whether a bias is added where the output rotation ends, by linear.
        out_dtype: of `rows` and `down`, and what the terms of `add` are rounded to; `join` writes a float16 image.
        weight_dtype: of the route weights of `add`, else None.

    Raises:
        FormatValueError: if the codebook is unknown or a rate not legal for it.
        KernelTypeError, KernelValueError: if the parts do not fit each other.
    """

    block_rows: ClassVar[int]
    """Most token rows of a block."""
    pass_rows: ClassVar[int]
    """Rows whose sums are in shared memory at once."""
    shared_limit: ClassVar[int]
    """Shared memory of a thread block, in bytes."""
    most_stages: ClassVar[int]
    """Steps in flight where shared memory suffices."""
    resident: ClassVar[int] = 1
    """Thread blocks that share a multiprocessor."""

    codebook: str
    half_bits: tuple[int, ...]
    epilogue: str = "rows"
    activation: Activation | None = None
    biased: tuple[bool, ...] = (False,)
    out_dtype: str = "float32"
    weight_dtype: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for half_bits in self.half_bits:
            get_codebook(self.codebook).check_rate(Rate(half_bits))
        _check_member("epilogue", self.epilogue, EPILOGUES)
        adds = self.epilogue == "add"
        _check_member("out_dtype", self.out_dtype, ("float16", "bfloat16") if adds else ("float16", "float32"))
        _check_member("weight_dtype", self.weight_dtype, tuple(VALUE_BYTES) if adds else (None,))
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
        """Whether a tile multiplies gate and then up."""
        return self.activation is not None and self.activation.gated

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """The rate of the first linear and of the last."""
        return Rate(self.half_bits[0]), Rate(self.half_bits[-1])

    @property
    def linears(self) -> int:
        """Linears that a tile multiplies, one after the other."""
        return _LINEARS if self.gated else 1

    @property
    def has_routes(self) -> bool:
        """Whether results go to the rows of routes."""
        return self.epilogue != "join"

    @property
    def overwrites(self) -> bool:
        """Whether the first product of a tile overwrites the sums, rather than adding to zeros.

        Sums that are overwritten have their registers through the epilogue before, which others need.
        """
        return self.resident == 1 and self.epilogue in ("rows", "down") and not any(self.biased)

    @property
    def law_bytes(self) -> int:
        """Bytes of the codebook's table, 0 without one."""
        return TABLE_BYTES.get(self.codebook, 0)

    @property
    def stash_bytes(self) -> int:
        """Bytes in which a thread block keeps gate until up is there."""
        return self.passes * self.pass_rows * BLOCK_CHANNELS * 4

    @property
    def passes(self) -> int:
        """Times that sums of a block go through shared memory."""
        return -(-self.block_rows // self.pass_rows)

    @property
    def scale_tables(self) -> int:
        """Tables of scales of a block: those of each linear's outputs, then those of the next linear's inputs."""
        return {"rows": 0, "down": 1, "add": 1, "join": self.linears + 1}[self.epilogue]

    @property
    def tables(self) -> int:
        """Tables of a block: of scales, then the bias of each linear where one has any."""
        has_bias = any(self.biased) and self.epilogue != "rows"
        return self.scale_tables + (self.linears if has_bias else 0)

    @property
    def row_stage_bytes(self) -> int:
        """Bytes of a stage's row tile."""
        return self.block_rows * PANEL_ROW_BYTES

    @property
    def code_stage_bytes(self) -> int:
        """Bytes of a stage's codes."""
        return max(column_share(rate).step_bytes for rate in self.rates)

    @property
    def sum_bytes(self) -> int:
        """Bytes of the staged sums of `pass_rows` rows."""
        return self.pass_rows * _SUM_PITCH * 4

    @property
    def table_bytes(self) -> int:
        """Bytes of a block's tables as float32."""
        return self.tables * BLOCK_CHANNELS * 4

    @property
    def info_bytes(self) -> int:
        """Bytes of one tile's information."""
        return info_table(self.tables)

    @property
    def _work_bytes(self) -> int:
        return self.law_bytes + self.sum_bytes + self.table_bytes + _INFO_BUFFERS * (self.info_bytes + _BARRIER_BYTES)

    @property
    def stages(self) -> int:
        """Steps in flight."""
        stage = self.row_stage_bytes + self.code_stage_bytes + _BARRIER_BYTES
        return min(self.most_stages, (self.shared_limit - _ALIGNMENT - self._work_bytes) // stage)

    @property
    def feeders(self) -> int:
        """Warps that fill steps in turn, a power of two, never more than the stages.

        A warp that fills step p has filled p - feeders, so the use of a stage before that one was given back.  With
        more warps than stages that says nothing of p - 2 stages, and a wait for p - stages, which knows a phase by its
        parity alone, would pass two phases early.
        """
        return 1 << (min(FEEDER_WARPS, self.stages).bit_length() - 1)

    @property
    def dynamic_shared_bytes(self) -> int:
        """Shared memory of a thread block."""
        stage = self.row_stage_bytes + self.code_stage_bytes + _BARRIER_BYTES
        return self.stages * stage + self._work_bytes

    def __str__(self) -> str:
        rates = "/".join(str(Rate(half_bits)) for half_bits in self.half_bits)
        law = f" {self.activation.kind}" if self.activation else ""
        bias = " biased" if any(self.biased) else ""
        weights = f" {self.weight_dtype} weights" if self.weight_dtype else ""
        return (
            f"{self.kernel} {self.arch} {self.codebook} K={rates} {self.epilogue}{law}{bias}{weights} {self.out_dtype}"
        )


@dataclass(frozen=True)
class PrefillGemmKey(_GemmKey):
    """The many-row grouped GEMM by `wgmma`; see `_GemmKey`.

    Raises:
        KernelValueError: if the target is not `GEMM_ARCH`.
    """

    kernel: ClassVar[str] = "prefill_gemm"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_gemm"
    block_rows: ClassVar[int] = BLOCK_ROWS_MOST
    pass_rows: ClassVar[int] = 128
    shared_limit: ClassVar[int] = SHARED_LIMIT
    most_stages: ClassVar[int] = 8
    registers: ClassVar[tuple[int, int]] = (232, 40)
    """Of a thread that multiplies and of one that feeds, once they have been handed over."""
    halves: ClassVar[bool] = False
    """Whether half a step is decoded at a time, into half as many registers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arch != GEMM_ARCH:
            raise KernelValueError(f"the many-row GEMM needs wgmma: architecture {self.arch!r} is not {GEMM_ARCH}")

    @property
    def by_products(self) -> bool:
        """Whether products of the warp finish the decoding, which pays where few rows leave the tensor cores idle.

        It does for codebooks that are bound by permutes and logic; mul1 takes as long either way.
        """
        return self.resident > 1 and self.codebook in (ThreeInst.name, MCG.name)


@dataclass(frozen=True)
class PrefillShortKey(PrefillGemmKey):
    """The same GEMM in row blocks so short that two thread blocks share a multiprocessor; see `_GemmKey`.

    Twice the warps hide what decoding waits for, and the products of one thread block run beside the epilogue of the
    other.  A weight is decoded for at most 64 rows, so this is for experts that have no more.
    """

    kernel: ClassVar[str] = "prefill_short"
    block_rows: ClassVar[int] = 64
    pass_rows: ClassVar[int] = 64
    shared_limit: ClassVar[int] = HALF_SHARED_LIMIT
    resident: ClassVar[int] = 2
    registers: ClassVar[tuple[int, int]] = (104, 32)


@dataclass(frozen=True)
class PrefillMiddleKey(PrefillShortKey):
    """The same for up to 96 rows, which leave registers for the fragments of half a step; see `_GemmKey`."""

    kernel: ClassVar[str] = "prefill_middle"
    block_rows: ClassVar[int] = 96
    pass_rows: ClassVar[int] = 96
    halves: ClassVar[bool] = True


@dataclass(frozen=True)
class PrefillMmaKey(_GemmKey):
    """The many-row grouped GEMM by `mma.sync`, which every target has; see `_GemmKey`."""

    kernel: ClassVar[str] = "prefill_mma"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_mma"
    block_rows: ClassVar[int] = 128
    pass_rows: ClassVar[int] = 64
    shared_limit: ClassVar[int] = LEAST_SHARED_LIMIT
    most_stages: ClassVar[int] = 2


GemmKey = PrefillGemmKey | PrefillMmaKey
"""The many-row grouped GEMM on some target."""


ENGINES: dict[str, type[PrefillGemmKey] | type[PrefillMmaKey]] = {
    "wgmma_short": PrefillShortKey,
    "wgmma_middle": PrefillMiddleKey,
    "wgmma_tall": PrefillGemmKey,
    "mma": PrefillMmaKey,
}
"""The kinds of many-row grouped GEMM by the instruction that they multiply with and their row blocks."""
SHORT_ROWS_MOST = 52
"""Rows of an average expert up to which `wgmma_short` is fastest: beyond, too many experts need two blocks."""
MIDDLE_ROWS_MOST = 72
"""Likewise of `wgmma_middle`, where a tile has few steps, so that what lies around them counts."""
MIDDLE_WIDTH_MOST = 1024
"""Intermediate channels up to which it has few."""


def engine_for(arch: str, rows: float, width: int) -> str:
    """The kind that a target takes.  Bits differ between targets alone.

    Args:
        arch: compile target.
        rows: of an average expert.
        width: intermediate channels.
    """
    if arch != GEMM_ARCH:
        return "mma"
    if rows <= SHORT_ROWS_MOST:
        return "wgmma_short"
    return "wgmma_middle" if rows <= MIDDLE_ROWS_MOST and width <= MIDDLE_WIDTH_MOST else "wgmma_tall"


def engines_for(arch: str, rows: float, width: int) -> tuple[str, ...]:
    """The kinds that a target takes for at most so many rows of an average expert, that of the fewest first."""
    above = [most + 1 for most in (0, SHORT_ROWS_MOST, MIDDLE_ROWS_MOST) if most < rows]
    return tuple(dict.fromkeys(engine_for(arch, min(least, rows), width) for least in above))


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
    """The kernel that cuts the segments of packed routes into row blocks.

    Args:
        arch: compile target.
        block_rows: most rows of a block, a multiple of 32.
    """

    kernel: ClassVar[str] = "prefill_schedule"
    module: ClassVar[str] = "trellis_kernels.cute.prefill_schedule"

    block_rows: int = BLOCK_ROWS_MOST

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_rows < ROW_UNIT or self.block_rows % ROW_UNIT:
            raise KernelValueError(f"block_rows {self.block_rows}: must be a positive multiple of {ROW_UNIT}")

    def __str__(self) -> str:
        return f"{self.kernel} {self.arch} rows<={self.block_rows}"


def prefill_keys(arch: str) -> tuple[KernelKey, ...]:
    """Specialisations of the many-token kernels that are compiled ahead of time: each epilogue, codebook and kind.

    There is one for every combination of rates, law and biases, which a plan lists and compiles; these stand for them.
    """
    kinds = [ENGINES[engine] for engine in engines_for(arch, math.inf, MIDDLE_WIDTH_MOST)]
    kind = kinds[-1]
    return (
        *(PrefillScheduleKey(arch, gemm.block_rows) for gemm in kinds),
        *(PrefillImageKey(arch, dtype, images) for dtype in VALUE_BYTES for images in (0, 1, 2)),
        *(PrefillReduceKey(arch, "float32", dtype) for dtype in VALUE_BYTES),
        *(key for gemm in kinds for key in _layer_keys(arch, gemm)),
        kind(arch, Mul1.name, (6,)),
        kind(arch, ThreeInst.name, (8,), "down", biased=(True,), out_dtype="float16"),
        kind(arch, MCG.name, (6,), "add", out_dtype="bfloat16", weight_dtype="float32"),
        kind(arch, LutE4M3.name, (6, 6), "join", Activation("silu"), biased=(False, False)),
        kind(arch, LutFp16.name, (10,), "down", out_dtype="float16"),
    )


def _layer_keys(arch: str, gemm: type[PrefillGemmKey] | type[PrefillMmaKey]) -> tuple[GemmKey, ...]:
    return (
        gemm(arch, Mul1.name, (6, 6), "join", Activation("silu"), biased=(False, False)),
        gemm(arch, MCG.name, (6, 6), "join", Activation("silu"), biased=(False, False)),
        gemm(arch, Mul1.name, (6,), "down", out_dtype="float16"),
    )
