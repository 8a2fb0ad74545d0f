"""Owns the compile keys of the ops around the GEMM: rotations, activation, route packing and reduction.

It must not know `cutlass` or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trellis_format.activations import ACTIVATIONS
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute.keys import VALUE_BYTES, KernelKey
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError

__all__ = [
    "PACK_STEPS",
    "ActivateKey",
    "PackKey",
    "ReduceKey",
    "RotateKey",
    "op_keys",
    "pack_class",
    "pack_tile_routes",
    "pack_tiles",
    "pack_warps",
]

_BLOCKS = (HADAMARD_BLOCK, 4 * HADAMARD_BLOCK)
_WARP_THREADS = 32

PACK_STEPS = 8
"""Routes of a thread of route packing."""


def _check_member(what: str, value: object, known: tuple[object, ...] | dict[str, int]) -> None:
    if value not in known:
        raise KernelValueError(f"{what} {value!r} is not one of {', '.join(map(str, known))}")


@dataclass(frozen=True)
class RotateKey(KernelKey):
    """The kernel that rotates rows, into the basis of a linear's codes or out of it.

    Args:
        arch: compile target.
        side: `input`, scale then Hadamard, or `output`, Hadamard then scale and bias.
        block: channels of a Hadamard block, 128 or 512.
        in_dtype: dtype of the rows.
        out_dtype: dtype of the results.
        wide: whether each lane reads 16 bytes at once; needs rows that start at multiples of 16 bytes and are a
            multiple of 8 channels wide.
        rows_at_once: rows that a warp has in flight, 1 or 4.

    Raises:
        KernelValueError: if a value is not one of those.
    """

    kernel: ClassVar[str] = "rotate"
    module: ClassVar[str] = "trellis_kernels.cute.rotate"

    side: str
    block: int
    in_dtype: str
    out_dtype: str
    wide: bool
    rows_at_once: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("side", self.side, ("input", "output"))
        _check_member("block", self.block, _BLOCKS)
        _check_member("in_dtype", self.in_dtype, VALUE_BYTES)
        _check_member("out_dtype", self.out_dtype, VALUE_BYTES)
        _check_member("rows_at_once", self.rows_at_once, (1, 4))

    def __str__(self) -> str:
        reads = "wide" if self.wide else "narrow"
        dtypes = f"{self.in_dtype}->{self.out_dtype}"
        return f"{self.kernel} {self.arch} {self.side} H{self.block} {dtypes} {reads} rows={self.rows_at_once}"


@dataclass(frozen=True)
class ActivateKey(KernelKey):
    """The kernel that joins gate and up.

    Args:
        arch: compile target.
        kind: name of the activation.

    Raises:
        KernelValueError: if the target or the activation is unknown.
    """

    kernel: ClassVar[str] = "activate"
    module: ClassVar[str] = "trellis_kernels.cute.activate"

    kind: str

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("activation", self.kind, ACTIVATIONS)

    def __str__(self) -> str:
        return f"{self.kernel} {self.arch} {self.kind}"


@dataclass(frozen=True)
class PackKey(KernelKey):
    """A kernel of route packing.

    Args:
        arch: compile target.
        stage: `all` packs one tile of routes in one launch; `count`, `offsets` and `place` are the three launches for
            any number.
        max_experts: experts that its shared memory has counters for, one of `EXPERT_CLASSES`.
        stable: whether routes of an expert keep their order.

    Raises:
        KernelValueError: if a value is not one of those.
    """

    kernel: ClassVar[str] = "pack_routes"
    module: ClassVar[str] = "trellis_kernels.cute.route_pack"
    EXPERT_CLASSES: ClassVar[tuple[int, ...]] = (128, 1024, 4096)
    """Numbers of experts that kernels are built for; a launch takes the smallest that suffices."""

    stage: str
    max_experts: int
    stable: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("stage", self.stage, ("all", "count", "offsets", "place"))
        _check_member("max_experts", self.max_experts, self.EXPERT_CLASSES)

    def __str__(self) -> str:
        order = "stable" if self.stable else "unordered"
        return f"{self.kernel} {self.arch} {self.stage} E<={self.max_experts} {order}"


def pack_class(num_experts: int) -> int:
    """The smallest class of route packing that has counters for that many experts.

    Raises:
        KernelUnsupportedError: if none has.
    """
    for size in PackKey.EXPERT_CLASSES:
        if size >= num_experts:
            return size
    raise KernelUnsupportedError(
        f"kernels pack routes of at most {PackKey.EXPERT_CLASSES[-1]} experts, got {num_experts}"
    )


def pack_warps(max_experts: int) -> int:
    """Warps of a thread block of route packing, so that a counter for each warp and expert fits 32 KiB."""
    return 8 if max_experts <= 1024 else 2


def pack_tile_routes(max_experts: int) -> int:
    """Routes of a tile of route packing."""
    return pack_warps(max_experts) * _WARP_THREADS * PACK_STEPS


def pack_tiles(routes: int, num_experts: int) -> int:
    """Tiles that routes are packed in; packing them takes a 4-byte counter for each tile and expert besides.

    Raises:
        KernelUnsupportedError: if there are too many experts.
    """
    return max(-(-routes // pack_tile_routes(pack_class(num_experts))), 1)


@dataclass(frozen=True)
class ReduceKey(KernelKey):
    """A kernel of the reduction of routes to tokens.

    Args:
        arch: compile target.
        stage: `ordered` sums each token's routes; `zero`, `accumulate` and `copy` are the three launches of the
            atomic sum.
        weight_dtype: dtype of the route weights.
        out_dtype: dtype of the results, to which `accumulate` also rounds each term.
        wide: whether each lane stores a whole chunk; needs rows that start at multiples of 16 bytes and are a multiple
            of 8 channels wide.

    Raises:
        KernelValueError: if a value is not one of those.
    """

    kernel: ClassVar[str] = "reduce_routes"
    module: ClassVar[str] = "trellis_kernels.cute.reduce"

    stage: str
    weight_dtype: str
    out_dtype: str
    wide: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_member("stage", self.stage, ("ordered", "zero", "accumulate", "copy"))
        _check_member("weight_dtype", self.weight_dtype, VALUE_BYTES)
        _check_member("out_dtype", self.out_dtype, VALUE_BYTES)

    def __str__(self) -> str:
        writes = "wide" if self.wide else "narrow"
        return f"{self.kernel} {self.arch} {self.stage} {self.weight_dtype}->{self.out_dtype} {writes}"


def op_keys(arch: str) -> tuple[KernelKey, ...]:
    """Every specialisation of these kernels that a launch can ask for on one compile target.

    Raises:
        KernelValueError: if the target is unknown.
    """
    return (
        *_rotate_keys(arch),
        *(ActivateKey(arch, kind) for kind in ACTIVATIONS),
        *_pack_keys(arch),
        *_reduce_keys(arch),
    )


def _rotate_keys(arch: str) -> tuple[RotateKey, ...]:
    out_dtypes = {"input": ("float16", "float32"), "output": tuple(VALUE_BYTES)}
    shapes = [(block, wide, 1) for block in _BLOCKS for wide in (True, False)] + [(HADAMARD_BLOCK, True, 4)]
    return tuple(
        RotateKey(arch, side, block, in_dtype, out_dtype, wide, rows)
        for side in out_dtypes
        for block, wide, rows in shapes
        for in_dtype in VALUE_BYTES
        for out_dtype in out_dtypes[side]
    )


def _pack_keys(arch: str) -> tuple[PackKey, ...]:
    smallest = PackKey.EXPERT_CLASSES[0]
    return (
        PackKey(arch, "offsets", smallest, True),
        *(PackKey(arch, stage, size, True) for size in PackKey.EXPERT_CLASSES for stage in ("all", "count", "place")),
        *(PackKey(arch, "place", size, False) for size in PackKey.EXPERT_CLASSES),
    )


def _reduce_keys(arch: str) -> tuple[ReduceKey, ...]:
    narrow = tuple(dtype for dtype in VALUE_BYTES if dtype != "float32")  # what an atomic sum may end in
    return (
        *(
            ReduceKey(arch, "ordered", weight, out, wide)
            for weight in VALUE_BYTES
            for out in VALUE_BYTES
            for wide in (True, False)
        ),
        ReduceKey(arch, "zero", "float32", "float32", True),
        *(ReduceKey(arch, "accumulate", weight, out, True) for weight in VALUE_BYTES for out in narrow),
        *(ReduceKey(arch, "copy", "float32", out, wide) for out in narrow for wide in (True, False)),
    )
