"""Owns the addresses of scratch parts and routing inputs inside the kernels.  It must not know what is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, Int64, Uint32

from trellis_format.extent import BLOCK
from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.moe_key import HEADER_BYTES, MoeSmallKey, scratch_parts

__all__ = [
    "DESCRIPTOR_BYTES",
    "GROUP_BYTES",
    "SLOT_BYTES",
    "VALUE_BYTES",
    "DirectScratch",
    "Ids",
    "Scratch",
    "direct_scratch",
    "load_place",
    "load_value",
    "scratch_at",
]

GROUP_BYTES = 64
"""Of a group: expert, first slot, rows, nothing, then the descriptor of each of its linears, 16 bytes."""
DESCRIPTOR_BYTES = 16
"""Of a linear: first word of its codes and 2K, 64 bits each."""
SLOT_BYTES = 16
"""Of a slot: flat route, a bit for each live route of its token, router weight in fp32, nothing."""
VALUE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Bytes of a value of each dtype."""


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


def scratch_at(base: Int64, max_tokens: Int32, key: MoeSmallKey) -> Scratch:
    """The addresses for one base and capacity."""
    starts: dict[str, Any] = {}
    each = 0
    for name, size in scratch_parts(key).items():
        starts[name] = base + HEADER_BYTES + Int64(max_tokens) * each
        each += size
    counters = starts.pop("counters")
    routes = Int64(max_tokens) * key.top_k
    hidden_blocks, width_blocks = key.padded_hidden // BLOCK, key.width // BLOCK
    return Scratch(
        header=base,
        up_arrivals=counters,
        down_arrivals=counters + routes * (4 * width_blocks),
        group_arrivals=counters + routes * (4 * (width_blocks + hidden_blocks)),
        group_ready=counters + routes * (4 * (width_blocks + hidden_blocks + 1)),
        token_arrivals=counters + routes * (4 * (width_blocks + hidden_blocks + 2)),
        **starts,
    )


@dataclass(frozen=True)
class DirectScratch:
    """Addresses of the parts of a direct layer."""

    arrivals: Int64
    up_parts: Int64
    results: Int64


def direct_scratch(base: Int64, max_tokens: Int32, key: MoeSmallKey) -> DirectScratch:
    """The addresses for one base and capacity of a direct layer."""
    starts: dict[str, Any] = {}
    each = 0
    for name, size in scratch_parts(key).items():
        starts[name] = base + HEADER_BYTES + Int64(max_tokens) * each
        each += size
    return DirectScratch(**starts)


def load_place(part: Scratch, group: Int32, projection: Any) -> list[Int64]:
    """First word and 2K of one linear of a group's expert."""
    entry = part.groups + Int64(group) * GROUP_BYTES
    return gpu.load_fresh_longs(entry + Int64(16 + projection * DESCRIPTOR_BYTES), 2)


@dataclass(frozen=True)
class Ids:
    """Where the experts of routes are named.

    Args:
        ids: address of the ids.
        g_map: address of the local expert of each id.
        map_length: ids that there are.
        map_bytes: of a value of the map, 0 for none.
        experts: local experts.
        key: the kernels.
    """

    ids: Int64
    g_map: Int64
    map_length: Int32
    map_bytes: Int32
    experts: Int32
    key: MoeSmallKey

    def load(self, route: Int32) -> Int32:
        """The local expert of a route, -1 if there is none."""
        key = self.key
        words = gpu.load_words(self.ids + Int64(route) * key.id_bytes, key.id_bytes // 4)
        high = words[-1] if key.id_bytes == 8 else Uint32(0)
        return gpu.local_id(words[0], high, self.g_map, self.map_length, self.map_bytes, self.experts)

    def live(self, token: Int32) -> Uint32:
        """A bit for each slot of a token that has an expert."""
        mask = Uint32(0)
        for slot in range(self.key.top_k):
            mask = mask | (Uint32(self.load(token * self.key.top_k + slot) >= 0) << slot)
        return mask


def load_value(table: Int64, index: Any, dtype: str) -> Float32:
    """One value of an array of a dtype, in fp32."""
    if dtype == "float32":
        return gpu.load_floats(table + Int64(index) * 4, 1)[0]
    return gpu.float_from(gpu.load_half(table + Int64(index) * 2), dtype, 0)
