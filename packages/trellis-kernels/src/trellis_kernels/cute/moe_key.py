"""Owns what the few-token MoE kernels are compiled for, and the scratch that they take.  It must not know `cutlass`.

Everything here is a pure function of numbers, so a planner can read it without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trellis_format.activations import Activation
from trellis_format.codebooks import EXL3_CODEBOOKS, get_codebook
from trellis_format.codebooks.mul1 import Mul1
from trellis_format.extent import BLOCK
from trellis_format.rates import Rate
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.errors import KernelTypeError, KernelUnsupportedError, KernelValueError

__all__ = [
    "EXPERT_CLASSES",
    "HEADER_BYTES",
    "MOST_BYTE_CHANNELS",
    "PRODUCT_ROWS",
    "ROW_COLUMNS",
    "MoeSmallKey",
    "Tiling",
    "counters_per_token",
    "direct_counters",
    "expert_class",
    "scratch_nbytes",
    "scratch_parts",
]

PRODUCT_ROWS = {"exact": 8, "unrounded": 8, "bytes": 4}
"""Arithmetics by name, and the token rows that one matrix product takes.

    exact      exact fp16 code values by fp16 activations, fp32 sums
    unrounded  not for codebooks with tables: fp16 values before the law's last rounding, by fp16 activations, fp32
               sums; within 2.2e-4 relative L2 of exact for one linear
    bytes      mul1 only: byte sums before the law's last rounding, by 16-bit activations with one scale for a row,
               exact int32 sums; likewise within 2.2e-4
"""
ROW_COLUMNS = (1, 2, 4)
"""Products that may share one decoded weight."""
MOST_BYTE_CHANNELS = 16384
"""Input channels whose sums of byte products stay below 2^31: 1020 * 128 * 16384."""
EXPERT_CLASSES = (256, 1024)
"""Numbers of experts that kernels are compiled for."""
HEADER_BYTES = 128
"""At the start of the scratch: the number of groups."""

_IO = ("float16", "bfloat16", "float32")
_STRIPS = BLOCK // 64
_MOST_TOP_K = 32  # a slot names its token's live routes in one word
_MOST_THREADS = 1024


@dataclass(frozen=True)
class Tiling:
    """How one GEMM is spread over warps and blocks.

    Args:
        blocks: 128-channel output blocks of a thread block, of each projection.
        slices: warps that share a strip of 64 output channels, each with every slices-th step of 64 input channels.
        split: thread blocks that share the input channels; their fp32 sums are added in order by the last one.
        stages: steps whose loads are in flight in a warp, the one at hand included.
        resident: thread blocks that the registers must leave room for on an SM.
        in_shared: whether they are staged in shared memory rather than in registers; takes at least 2 stages.
        rereads: whether rows staged there are read again for each output channel of a lane, which frees registers.
        most: thread blocks that may share an SM of 228 KiB, 0 for any number; their shared memory grows until no more
            fit, so that a launch which begins while another drains spreads evenly.  For direct layers.

    Raises:
        KernelValueError: if a number is not positive.
    """

    blocks: int = 1
    slices: int = 2
    split: int = 1
    stages: int = 2
    resident: int = 2
    in_shared: bool = False
    rereads: bool = False
    most: int = 0

    def __str__(self) -> str:
        place = ("ring reread" if self.rereads else "ring") if self.in_shared else "registers"
        room = f" resident {self.resident}" if self.resident > 1 else ""
        room += f" at most {self.most}" if self.most else ""
        return f"{self.blocks}x{self.slices}/{self.split} {place} {self.stages}{room}"

    def __post_init__(self) -> None:
        for name in ("blocks", "slices", "split", "stages", "resident"):
            if getattr(self, name) < 1:
                raise KernelValueError(f"tiling {name} must be at least 1, got {getattr(self, name)}")
        if self.most < 0:
            raise KernelValueError(f"tiling most must not be negative, got {self.most}")
        if self.in_shared and self.stages < 2:
            raise KernelValueError(f"a ring in shared memory takes at least 2 stages, got {self.stages}")
        if self.rereads and not self.in_shared:
            raise KernelValueError("rows are read again from a ring in shared memory only; set in_shared")


@dataclass(frozen=True)
class MoeSmallKey(KernelKey):
    """The kernels of a fused expert layer for few tokens.

    Args:
        arch: compile target.
        codebook: name of the codebook of all linears.
        hidden: channels of x and out.
        padded_hidden: hidden channels as stored, a multiple of 128.
        width: intermediate channels that the rank holds, a multiple of 128.
        max_experts: experts that shared memory has counters for, one of `EXPERT_CLASSES`; how many there are is a
            number of the launch.
        top_k: routes of a token.
        gated: whether there is a gate.
        up_rates: every 2K that occurs in gate or up, ascending.
        down_rates: every 2K that occurs in down, ascending.
        activation: the law between the GEMMs.
        biased: whether gate (False without one), up and down have biases.
        shared_inputs: whether all experts share the input vectors.
        joint_inputs: whether gate and up share one input vector.
        shared_outputs: whether all experts share the output vector.
        x_dtype: `float16`, `bfloat16` or `float32`.
        out_dtype: the same.
        weight_dtype: of the router weights, the same.
        id_bytes: 4 or 8.
        arithmetic: of the two GEMMs, one of `PRODUCT_ROWS`.
        row_columns: largest number of products with one decoded weight, one of `ROW_COLUMNS`.
        direct: whether every route is multiplied by itself, in two launches without groups; for very few tokens.
        up: tiling of gate and up.
        down: tiling of down.

    Raises:
        FormatValueError: if the codebook is unknown or a 2K is not legal for it.
        KernelTypeError, KernelValueError: if another field is wrong.
    """

    kernel: ClassVar[str] = "moe_small"
    module: ClassVar[str] = "trellis_kernels.cute.moe_small"

    codebook: str
    hidden: int
    padded_hidden: int
    width: int
    max_experts: int
    top_k: int
    gated: bool
    up_rates: tuple[int, ...]
    down_rates: tuple[int, ...]
    activation: Activation
    biased: tuple[bool, bool, bool] = (False, False, False)
    shared_inputs: bool = False
    joint_inputs: bool = False
    shared_outputs: bool = False
    x_dtype: str = "float16"
    out_dtype: str = "float16"
    weight_dtype: str = "float32"
    id_bytes: int = 8
    arithmetic: str = "exact"
    row_columns: int = 1
    direct: bool = False
    up: Tiling = Tiling()
    down: Tiling = Tiling()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_rates()
        self._check_sizes()
        if self.activation.gated != self.gated:
            need = "a" if self.activation.gated else "no"
            raise KernelValueError(f"activation {self.activation.kind} takes {need} gate")
        for name in ("x_dtype", "out_dtype", "weight_dtype"):
            if getattr(self, name) not in _IO:
                raise KernelTypeError(f"{name} must be one of {', '.join(_IO)}, got {getattr(self, name)!r}")
        if self.id_bytes not in (4, 8):
            raise KernelTypeError(f"ids must have 4 or 8 bytes, got {self.id_bytes}")
        if self.row_columns not in ROW_COLUMNS:
            known = ", ".join(map(str, ROW_COLUMNS))
            raise KernelValueError(f"row_columns {self.row_columns} is not one of {known}")
        self._check_arithmetic()
        if self.direct:
            self._check_direct()
        for name in ("up", "down"):
            blocks, each = self.outputs(name) // BLOCK, self.tiling(name).blocks
            if blocks % each:
                raise KernelValueError(f"{name} has {blocks} blocks of {BLOCK} channels, not a multiple of {each}")
            if self.threads(name) > _MOST_THREADS:
                raise KernelValueError(f"{name} would take {self.threads(name)} threads, at most {_MOST_THREADS} fit")

    def _check_arithmetic(self) -> None:
        if self.arithmetic not in PRODUCT_ROWS:
            known = ", ".join(PRODUCT_ROWS)
            raise KernelValueError(f"unknown arithmetic {self.arithmetic!r}; known: {known}")
        if self.arithmetic == "unrounded" and self.codebook not in EXL3_CODEBOOKS:
            known = ", ".join(EXL3_CODEBOOKS)
            raise KernelUnsupportedError(
                f"arithmetic unrounded needs one of the codebooks {known}, got {self.codebook}; use exact"
            )
        if self.arithmetic == "bytes":
            if self.codebook != Mul1.name:
                raise KernelUnsupportedError(
                    f"arithmetic bytes needs codebook {Mul1.name}, got {self.codebook}; use exact"
                )
            channels = max(self.padded_hidden, self.width)
            if channels > MOST_BYTE_CHANNELS:
                raise KernelUnsupportedError(
                    f"arithmetic bytes sums at most {MOST_BYTE_CHANNELS} input channels, got {channels}; use exact"
                )

    def _check_direct(self) -> None:
        if self.row_columns != 1 or self.down.split != 1:
            raise KernelValueError(
                f"direct takes row_columns 1 and a down split of 1, got {self.row_columns} and {self.down.split}"
            )
        if self.up.split > self.padded_hidden // BLOCK:
            raise KernelValueError(
                f"direct splits whole blocks of {BLOCK} input channels: at most {self.padded_hidden // BLOCK} ways, "
                f"got {self.up.split}"
            )

    def _check_rates(self) -> None:
        codebook = get_codebook(self.codebook)
        for name in ("up_rates", "down_rates"):
            rates = getattr(self, name)
            if not rates or rates != tuple(sorted(set(rates))):
                raise KernelValueError(f"{name} must be ascending and not empty, got {rates}")
            for half_bits in rates:
                codebook.check_rate(Rate(half_bits))

    def _check_sizes(self) -> None:
        for name in ("padded_hidden", "width"):
            size = getattr(self, name)
            if size < BLOCK or size % BLOCK:
                raise KernelValueError(
                    f"{name} {size} is not a positive multiple of {BLOCK}; nearest: {max(-(-size // BLOCK), 1) * BLOCK}"
                )
        if not 0 < self.hidden <= self.padded_hidden:
            raise KernelValueError(f"hidden {self.hidden} must be within 1..{self.padded_hidden}")
        if self.max_experts not in EXPERT_CLASSES:
            known = ", ".join(map(str, EXPERT_CLASSES))
            raise KernelValueError(f"max_experts {self.max_experts} is not one of {known}")
        if self.top_k < 1:
            raise KernelValueError(f"top {self.top_k} must be at least 1")
        if self.top_k > _MOST_TOP_K:
            raise KernelUnsupportedError(f"top {self.top_k} is more than {_MOST_TOP_K} routes for a token")

    @property
    def projections(self) -> int:
        """Linears of the first GEMM: gate and up, or up alone."""
        return 2 if self.gated else 1

    @property
    def rotated_inputs(self) -> int:
        """Rotated activations of a row: one for each input vector."""
        return 1 if self.joint_inputs or not self.gated else 2

    @property
    def overlaps(self) -> bool:
        """Whether a launch begins while the one before it drains, which takes sm_90."""
        return self.arch != "sm_80"

    @property
    def is_bytes(self) -> bool:
        """Whether products are of bytes."""
        return self.arithmetic == "bytes"

    @property
    def group_rows(self) -> int:
        """Most rows of a group of routes."""
        return PRODUCT_ROWS[self.arithmetic] * self.row_columns

    def tiling(self, gemm: str) -> Tiling:
        """Tiling of `up` or `down`."""
        return self.up if gemm == "up" else self.down

    def rates(self, gemm: str) -> tuple[int, ...]:
        """Every 2K that occurs in `up` or `down`, ascending."""
        return self.up_rates if gemm == "up" else self.down_rates

    def linears(self, gemm: str) -> int:
        """Linears of `up` or `down`."""
        return self.projections if gemm == "up" else 1

    def outputs(self, gemm: str) -> int:
        """Output channels of a linear of `up` or `down`."""
        return self.width if gemm == "up" else self.padded_hidden

    def columns(self, gemm: str) -> int:
        """Thread blocks of `up` or `down` for one group or route."""
        tiling = self.tiling(gemm)
        return self.outputs(gemm) // BLOCK // tiling.blocks * tiling.split

    def strips(self, gemm: str) -> int:
        """Strips of 64 output channels of a thread block of `up` or `down`."""
        return self.tiling(gemm).blocks * _STRIPS * self.linears(gemm)

    def threads(self, gemm: str) -> int:
        """Threads of a block of `up` or `down`."""
        return 32 * self.strips(gemm) * self.tiling(gemm).slices

    def most_groups(self, tokens: int, experts: int | None = None) -> int:
        """Groups that suffice for any routing of that many tokens over a number of experts (default: the most)."""
        routes = tokens * self.top_k
        if self.direct:
            return routes
        return min(routes, min(routes, experts or self.max_experts) + routes // self.group_rows)

    def __str__(self) -> str:
        rates = "/".join(
            ",".join(str(Rate(half)) for half in half_bits) for half_bits in (self.up_rates, self.down_rates)
        )
        return (
            f"{self.kernel} {self.arch} {self.codebook} K={rates} {self.padded_hidden}x{self.width} "
            f"E<={self.max_experts} top {self.top_k} {self.activation.kind} {self.x_dtype} "
            f"{self.arithmetic} {'direct' if self.direct else f'rows {self.group_rows}'} {self.up}, {self.down}"
        )


def expert_class(experts: int) -> int:
    """The smallest class of a number of experts.

    Raises:
        KernelUnsupportedError: if there are more experts than kernels have counters for.
    """
    for size in EXPERT_CLASSES:
        if 0 < experts <= size:
            return size
    raise KernelUnsupportedError(f"{experts} experts: few-token kernels take 1 to {EXPERT_CLASSES[-1]}")


def scratch_parts(key: MoeSmallKey) -> dict[str, int]:
    """Bytes of each part of the scratch for one token, in order, each a multiple of 16.

    groups        `[routes, 64] uint8`: expert, first slot, rows, and the descriptors of the expert's linears
    slots         `[routes, 4] int32`: flat route, which of its token's routes are live, router weight as fp32 bits, 0
    counters      arrivals for each group and block of up and down, for each token and block of the result, and
                  for each group over the blocks of up; and whether a group's rows are ready for down
    rotated       `[tokens or routes, rotated inputs, padded hidden] float16`, or two bytes for each channel
    rotated_laws  `[tokens or routes, rotated inputs, 2] float32`, only for bytes: scale, sum
    joined        `[routes, width] float16`, by slot, ready for down
    joined_bytes  the same as two bytes for each channel, only for bytes
    joined_laws   `[routes, 2] float32`, only for bytes: scale, sum
    up_parts      `[routes, split, projections, width] float32`, only where up is split
    down_parts    `[routes, split, padded hidden] float32`, only where down is split
    results       `[routes, padded hidden] float32`, weighted rows by route

    A direct layer has `arrivals`, a counter for each token and block of the result, `up_parts` and `results` alone,
    both by route.
    """
    routes = key.top_k
    if key.direct:
        parts = {
            "arrivals": 4 * direct_counters(key),
            "up_parts": routes * key.up.split * key.projections * key.width * 4,
            "results": routes * key.padded_hidden * 4,
        }
        return {name: -(-size // 16) * 16 for name, size in parts.items()}
    rotated = (1 if key.shared_inputs else routes) * key.rotated_inputs
    parts = {
        "groups": routes * 64,
        "slots": routes * 16,
        "counters": 4 * counters_per_token(key),
        "rotated": rotated * key.padded_hidden * 2,
        "rotated_laws": rotated * 8 * key.is_bytes,
        "joined": routes * key.width * 2,
        "joined_bytes": routes * key.width * 2 * key.is_bytes,
        "joined_laws": routes * 8 * key.is_bytes,
        "up_parts": routes * key.up.split * key.projections * key.width * 4 if key.up.split > 1 else 0,
        "down_parts": routes * key.down.split * key.padded_hidden * 4 if key.down.split > 1 else 0,
        "results": routes * key.padded_hidden * 4,
    }
    return {name: -(-size // 16) * 16 for name, size in parts.items()}


def direct_counters(key: MoeSmallKey) -> int:
    """Counters for one token of a direct layer."""
    return key.padded_hidden // BLOCK


def counters_per_token(key: MoeSmallKey) -> int:
    """Counters for one token of capacity."""
    hidden_blocks, width_blocks = key.padded_hidden // BLOCK, key.width // BLOCK
    return key.top_k * (width_blocks + hidden_blocks + 2) + hidden_blocks


def scratch_nbytes(key: MoeSmallKey, max_tokens: int) -> int:
    """Bytes of scratch that suffice for up to that many tokens.

    Raises:
        KernelValueError: if the number of tokens is not positive.
    """
    if max_tokens < 1:
        raise KernelValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return HEADER_BYTES + max_tokens * sum(scratch_parts(key).values())
