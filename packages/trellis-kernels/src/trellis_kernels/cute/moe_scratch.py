"""Owns the addresses of scratch parts inside the kernels.  It must not know what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Int32, Int64

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.moe_arguments import MoeArguments
from trellis_kernels.cute.moe_key import HEADER_BYTES, MoeSmallKey, scratch_parts

__all__ = [
    "DESCRIPTOR_BYTES",
    "GROUP_BYTES",
    "SLOT_BYTES",
    "DirectScratch",
    "Scratch",
    "direct_scratch",
    "load_place",
    "scratch_at",
]

GROUP_BYTES = 64
"""Of a group: expert, first slot, rows, nothing, then the descriptor of each of its linears, 16 bytes."""
DESCRIPTOR_BYTES = 16
"""Of a linear: first word of its codes and 2K, 64 bits each."""
SLOT_BYTES = 16
"""Of a slot: flat route, a bit for each live route of its token, router weight in fp32, nothing."""


@dataclass(frozen=True)
class Scratch:
    """Addresses of the parts, and of the five kinds of counters."""

    header: Int64
    groups: Int64
    slots: Int64
    up_arrivals: Int64
    down_arrivals: Int64
    token_arrivals: Int64
    group_arrivals: Int64
    group_ready: Int64
    rotated: Int64
    rotated_laws: Int64
    joined: Int64
    joined_bytes: Int64
    joined_laws: Int64
    up_parts: Int64
    down_parts: Int64
    results: Int64


def scratch_at(args: MoeArguments, key: MoeSmallKey) -> Scratch:
    """The addresses of a launch."""
    starts = _starts(args, key)
    counters = starts.pop("counters")
    routes = Int64(args.max_tokens) * key.top_k
    hidden_blocks, width_blocks = key.padded_hidden // BLOCK, key.width // BLOCK
    return Scratch(
        header=args.scratch,
        up_arrivals=counters,
        down_arrivals=counters + routes * (4 * width_blocks),
        group_arrivals=counters + routes * (4 * (width_blocks + hidden_blocks)),
        group_ready=counters + routes * (4 * (width_blocks + hidden_blocks + 1)),
        token_arrivals=counters + routes * (4 * (width_blocks + hidden_blocks + 2)),
        **starts,
    )


def _starts(args: MoeArguments, key: MoeSmallKey) -> dict[str, Any]:
    starts: dict[str, Any] = {}
    each = 0
    for name, size in scratch_parts(key).items():
        starts[name] = args.scratch + HEADER_BYTES + Int64(args.max_tokens) * each
        each += size
    return starts


@dataclass(frozen=True)
class DirectScratch:
    """Addresses of the parts of a direct layer."""

    arrivals: Int64
    up_parts: Int64
    results: Int64


def direct_scratch(args: MoeArguments, key: MoeSmallKey) -> DirectScratch:
    """The addresses of a launch of a direct layer."""
    return DirectScratch(**_starts(args, key))


def load_place(part: Scratch, group: Int32, projection: Any) -> list[Int64]:
    """First word and 2K of one linear of a group's expert."""
    entry = part.groups + Int64(group) * GROUP_BYTES
    return gpu.load_fresh_longs(entry + Int64(16 + projection * DESCRIPTOR_BYTES), 2)
