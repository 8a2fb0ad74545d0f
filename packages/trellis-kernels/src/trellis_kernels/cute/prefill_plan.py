"""Owns the plan of a layer for many tokens: its kernels, how its work is cut, and its scratch.

It must not know `cutlass` or tensors.  Scratch is bounded in two ways.  Tokens are handled in *chunks*, whose route
rows wait for their ordered sum; the packed slots of a chunk are handled in *windows*, which hold the images of rows
between the steps.  Neither grows with the number of experts beyond the padding of their segments, and no bit of the
result depends on either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trellis_format.activations import Activation
from trellis_format.extent import BLOCK, TrellisExtent
from trellis_format.source import Projection, TrellisSource
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.op_keys import PackKey, ReduceKey, pack_class, pack_tiles
from trellis_kernels.cute.prefill_key import (
    BLOCK_ROWS_MOST,
    ENGINES,
    ENTRY_WORDS,
    STASH_NBYTES,
    GemmKey,
    PrefillImageKey,
    PrefillReduceKey,
    PrefillScheduleKey,
    block_capacity,
    engine_for,
    engines_for,
    image_nbytes,
)
from trellis_kernels.cute.prefill_share import ROW_GROUP
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError
from trellis_kernels.routes import route_capacity

__all__ = ["REDUCTIONS", "SCRATCH_ALIGNMENT", "PrefillPlan", "plan_prefill"]

REDUCTIONS = ("ordered", "atomic")
"""How a token's routes are added."""

SCRATCH_ALIGNMENT = 256
"""Bytes that the scratch, and every part of it, starts at a multiple of."""

_LEAST_WINDOW = 4096  # slots; below, the thread blocks of a window do not fill a large device
_ATOMIC_TOKENS = 8  # up to as many, the ordered sum takes no time that additions could save
_CHUNK_CHANNELS = 8  # that are read or written at once


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """A layer's launches for any number of tokens up to a capacity.

    Attributes:
        arch: compile target.
        codebook: name of the codebook.
        hidden: channels of x and of the result, a multiple of 8.
        padded_hidden: hidden channels of the codes, a multiple of 128.
        width: the rank's intermediate channels, a multiple of 128.
        num_experts: experts of the rank.
        top_k: routes of a token.
        max_tokens: capacity.
        up_rates: 2K of gate and up (or up alone), every combination that an expert has, ascending.
        down_rates: 2K of down, ascending.
        activation: the law.
        biased: whether each projection has a bias on this rank.
        joint_inputs: whether gate and up share one input vector.
        x_dtype: of x.
        out_dtype: of the result.
        weight_dtype: of the router weights.
        chunk_tokens: tokens that are summed at once.
        window_slots: packed slots whose images exist at once, a multiple of 8.
        reduction: `ordered`, by slot and with repeated bits, from a row for each route; or `atomic`, in any order and
            from terms rounded to `out_dtype`, in a row for each token.
        engine: what multiplies, one of `ENGINES`; None is what suits the routes of a chunk.
        route_experts: experts that routes are spread over, those of other ranks included; 0 is `num_experts`.
    """

    arch: str
    codebook: str
    hidden: int
    padded_hidden: int
    width: int
    num_experts: int
    top_k: int
    max_tokens: int
    up_rates: tuple[tuple[int, ...], ...]
    down_rates: tuple[int, ...]
    activation: Activation
    biased: tuple[bool, ...]
    joint_inputs: bool
    x_dtype: str
    out_dtype: str
    weight_dtype: str
    chunk_tokens: int
    window_slots: int
    reduction: str = "ordered"
    engine: str | None = None
    route_experts: int = 0

    @property
    def group_rows(self) -> int:
        """Rows that an expert's routes are padded to."""
        return ROW_GROUP

    def engine_for(self, routes: int) -> str:
        """What multiplies a chunk of so many routes; no bit of the result depends on it."""
        return self.engine or engine_for(self.arch, self._rows(routes), self.width)

    def _rows(self, routes: int) -> float:
        """Routes of an average expert."""
        return routes / (self.route_experts or self.num_experts)

    @property
    def engines(self) -> tuple[str, ...]:
        """Whatever multiplies a chunk, that of the fewest routes first."""
        return (self.engine,) if self.engine else engines_for(self.arch, self._rows(self.chunk_routes), self.width)

    @property
    def block_rows(self) -> int:
        """Most rows that share the decoding of a weight, where they are the fewest."""
        return min(ENGINES[engine].block_rows for engine in self.engines)

    @property
    def is_uniform(self) -> bool:
        """Whether all experts have the same rates, so that one cut of their rows serves every linear."""
        return len(self.up_rates) == len(self.down_rates) == 1

    @property
    def images(self) -> int:
        """Images of rotated rows: one that gate and up share, or one of each."""
        return 2 if self.activation.gated and not self.joint_inputs else 1

    @property
    def chunk_routes(self) -> int:
        """Routes of a chunk."""
        return self.chunk_tokens * self.top_k

    @property
    def chunk_slots(self) -> int:
        """Packed slots that always suffice for a chunk."""
        return route_capacity(self.chunk_routes, self.num_experts, ROW_GROUP)

    def windows(self, routes: int) -> tuple[tuple[int, int], ...]:
        """First slot and slots of each window that routes may fill."""
        slots = -(-route_capacity(routes, self.num_experts, ROW_GROUP) // ROW_GROUP) * ROW_GROUP
        firsts = range(0, slots, self.window_slots)
        return tuple((first, min(self.window_slots, slots - first)) for first in firsts)

    @property
    def scratch_parts(self) -> dict[str, int]:
        """Bytes of each part of the scratch, in order.

        route_indices, block_experts, packed_count, expert_offsets, expert_counts   packed routes, int32
        pack_work                                                                   counters of packing, int32
        entries, entry_count                                                        row blocks, int32
        image_0, image_1    `[padded hidden / 64, window slots, 64] float16`
        stash               sums of gate that wait for those of up, float32
        joined              `[width / 64, window slots, 64] float16`
        rows                `[chunk routes, padded hidden] float16`, of an ordered reduction
        sums                `[chunk tokens, padded hidden] float32`, of an atomic one
        """
        slots = self.chunk_slots
        parts = {
            "route_indices": 4 * slots,
            "block_experts": 4 * -(-slots // ROW_GROUP),
            "packed_count": 4,
            "expert_offsets": 4 * (self.num_experts + 1),
            "expert_counts": 4 * self.num_experts,
            "pack_work": 4 * pack_tiles(self.chunk_routes, self.num_experts) * self.num_experts,
            "entries": 4 * ENTRY_WORDS * block_capacity(self.window_slots, self.num_experts, self.block_rows),
            "entry_count": 4,
        }
        for index in range(self.images):
            parts[f"image_{index}"] = image_nbytes(self.window_slots, self.padded_hidden)
        if self.activation.gated:
            parts["stash"] = STASH_NBYTES
        parts["joined"] = image_nbytes(self.window_slots, self.width)
        if self.reduction == "atomic":
            parts["sums"] = self.chunk_tokens * self.padded_hidden * 4
        else:
            parts["rows"] = self.chunk_routes * self.padded_hidden * 2
        return parts

    @property
    def scratch_nbytes(self) -> int:
        """Bytes of scratch, each part rounded up to the alignment."""
        return sum(_aligned(nbytes) for nbytes in self.scratch_parts.values())

    @property
    def keys(self) -> tuple[KernelKey, ...]:
        """Every kernel that a launch may take."""
        return (
            *self._pack_keys(),
            *(PrefillScheduleKey(self.arch, ENGINES[engine].block_rows) for engine in self.engines),
            self.image_key,
            *(self.join_key(rates, engine) for engine in self.engines for rates in self.up_rates),
            *(self.down_key(rate, engine) for engine in self.engines for rate in self.down_rates),
            *self.reduce_keys,
        )

    def _pack_keys(self) -> tuple[KernelKey, ...]:
        smallest = PackKey.EXPERT_CLASSES[0]
        size = pack_class(self.num_experts)
        return (
            *(PackKey(self.arch, stage, size, True) for stage in ("all", "count", "place")),
            PackKey(self.arch, "offsets", smallest, True),
        )

    @property
    def image_key(self) -> PrefillImageKey:
        """The kernel that rotates rows in."""
        return PrefillImageKey(self.arch, self.x_dtype, self.images)

    @property
    def reduce_keys(self) -> tuple[KernelKey, ...]:
        """The kernels that sum route rows, or that begin and end an atomic sum."""
        if self.reduction == "atomic":
            return (
                ReduceKey(self.arch, "zero", "float32", "float32", True),
                ReduceKey(self.arch, "copy", "float32", self.out_dtype, True),
            )
        return (PrefillReduceKey(self.arch, self.weight_dtype, self.out_dtype),)

    def join_key(self, rates: tuple[int, ...], engine: str) -> GemmKey:
        """The kernel of gate and up at one combination of rates."""
        return ENGINES[engine](
            arch=self.arch,
            codebook=self.codebook,
            half_bits=rates,
            epilogue="join",
            activation=self.activation,
            biased=self.biased[:-1],
        )

    def down_key(self, rate: int, engine: str) -> GemmKey:
        """The kernel of down at one rate."""
        return ENGINES[engine](
            arch=self.arch,
            codebook=self.codebook,
            half_bits=(rate,),
            epilogue="add" if self.reduction == "atomic" else "down",
            biased=self.biased[-1:],
            out_dtype=self.out_dtype if self.reduction == "atomic" else "float16",
            weight_dtype=self.weight_dtype if self.reduction == "atomic" else None,
        )


def plan_prefill(
    source: TrellisSource,
    *,
    arch: str,
    max_tokens: int,
    top_k: int,
    extent: TrellisExtent | None = None,
    activation: Activation | None = None,
    x_dtype: str = "float16",
    out_dtype: str = "float16",
    weight_dtype: str = "float32",
    scratch_bound: int | None = None,
    reduction: str = "ordered",
    route_experts: int | None = None,
) -> PrefillPlan:
    """The kernels for a layer at a capacity, in the fewest chunks, then the fewest windows, that a bound allows.

    Args:
        source: the layer.
        arch: compile target.
        max_tokens: most tokens of a launch.
        top_k: routes of a token.
        extent: the rank's share of the intermediate axis (default: the source's).
        activation: the law (default: the source's).
        x_dtype: of x.
        out_dtype: of the result.
        weight_dtype: of the router weights.
        scratch_bound: most bytes of scratch; None is no bound, one chunk and one window.
        reduction: `ordered` or `atomic`; see `PrefillPlan`.
        route_experts: experts that routes are spread over (default: the rank's).

    Raises:
        KernelUnsupportedError: if the layer is one that these kernels do not take, or no activation is known.
        KernelValueError: if a number is out of range, or the bound is too small for one token.
        FormatValueError: if a rate is not one of the codebook's.
    """
    law = activation or source.activation
    share = extent or source.extent
    geometry = source.geometry
    if law is None:
        raise KernelUnsupportedError("the layer names no activation; give one")
    _check_layer(source, share, max_tokens, top_k)
    _check_reduction(reduction, max_tokens, out_dtype)
    count = len(geometry.projections)
    rates = [
        tuple(source.rates.rate(expert, p).half_bits for p in range(count)) for expert in range(geometry.num_experts)
    ]
    holds_down_bias = share.first_channel == 0
    biased = tuple(
        name in source.biased and (name is not Projection.DOWN or holds_down_bias) for name in geometry.projections
    )
    whole = PrefillPlan(
        arch=arch,
        codebook=source.codebook,
        hidden=geometry.hidden_size,
        padded_hidden=geometry.padded_hidden_size,
        width=share.width,
        num_experts=geometry.num_experts,
        top_k=top_k,
        max_tokens=max_tokens,
        up_rates=tuple(sorted({row[:-1] for row in rates})),
        down_rates=tuple(sorted({row[-1] for row in rates})),
        activation=law,
        biased=biased,
        joint_inputs=source.joint_input_scales,
        x_dtype=x_dtype,
        out_dtype=out_dtype,
        weight_dtype=weight_dtype,
        chunk_tokens=max_tokens,
        window_slots=ROW_GROUP,
        reduction=reduction,
        engine="mma" if engine_for(arch, 1, share.width) == "mma" else None,
        route_experts=route_experts or geometry.num_experts,
    )
    plan = _within(whole, math.inf if scratch_bound is None else scratch_bound)
    if not plan.keys:  # building them refuses an illegal combination here rather than at the first launch
        raise KernelUnsupportedError("the layer has no kernels")
    return plan


def _check_layer(source: TrellisSource, share: TrellisExtent, max_tokens: int, top_k: int) -> None:
    geometry = source.geometry
    if source.expert_transform is not None:
        raise KernelUnsupportedError("the many-token kernels do not take an intermediate Hadamard")
    if max_tokens < 1 or top_k < 1:
        raise KernelValueError(f"{max_tokens} tokens of {top_k} routes: both must be at least 1")
    if max_tokens * top_k >= 2**31:
        raise KernelValueError(f"{max_tokens} tokens of {top_k} routes: at most {2**31 - 1} routes fit their indices")
    if share.width == 0 or share.width % BLOCK or geometry.padded_hidden_size % BLOCK:
        raise KernelValueError(
            f"{share.width} intermediate and {geometry.padded_hidden_size} hidden channels: "
            f"both must be positive multiples of {BLOCK}"
        )
    if geometry.hidden_size % _CHUNK_CHANNELS:
        below = geometry.hidden_size // _CHUNK_CHANNELS * _CHUNK_CHANNELS
        raise KernelValueError(
            f"{geometry.hidden_size} hidden channels: must be a multiple of {_CHUNK_CHANNELS}, for example {below}"
        )
    pack_class(geometry.num_experts)


def _check_reduction(reduction: str, max_tokens: int, out_dtype: str) -> None:
    if reduction not in REDUCTIONS:
        raise KernelValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    failed = [
        text
        for text, holds in (
            (f"{max_tokens} tokens are not above {_ATOMIC_TOKENS}", max_tokens > _ATOMIC_TOKENS),
            (f"results are {out_dtype}, not float16 or bfloat16", out_dtype in ("float16", "bfloat16")),
        )
        if not holds
    ]
    if reduction == "atomic" and failed:
        raise KernelUnsupportedError(f"the atomic reduction does not take this plan: {'; '.join(failed)}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def _within(plan: PrefillPlan, bound: float) -> PrefillPlan:
    """The plan cut into the fewest chunks whose windows are not too small for the bound."""
    chunks = 1
    while True:
        tokens = -(-plan.max_tokens // chunks)
        chunk = replace(plan, chunk_tokens=tokens)
        slots = -(-chunk.chunk_slots // ROW_GROUP) * ROW_GROUP
        least = min(slots, _LEAST_WINDOW)
        window = _widest_window(chunk, least, slots, bound)
        if window is not None:
            return replace(chunk, window_slots=window)
        if tokens == 1:
            need = replace(chunk, window_slots=least).scratch_nbytes
            raise KernelValueError(f"a scratch bound of {bound:.0f} bytes is below the {need} that one token needs")
        chunks = max(chunks + 1, -(-plan.max_tokens // max(tokens - max(tokens // 16, 1), 1)))


def _widest_window(chunk: PrefillPlan, least: int, slots: int, bound: float) -> int | None:
    """The most slots of a window that the bound allows: all, or a multiple of 128, and at least `least`."""
    if replace(chunk, window_slots=slots).scratch_nbytes <= bound:
        return slots
    if replace(chunk, window_slots=least).scratch_nbytes > bound:
        return None
    low, high = least // BLOCK_ROWS_MOST, slots // BLOCK_ROWS_MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = replace(chunk, window_slots=middle * BLOCK_ROWS_MOST).scratch_nbytes <= bound
        low, high = (middle, high) if fits else (low, middle)
    return max(low * BLOCK_ROWS_MOST, least)
