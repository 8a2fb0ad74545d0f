"""Owns what the launches of a few-token layer are told, and the experts that it names.

It must not know what is computed.  Every kernel takes all of it and reads what it needs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64, Uint32

from trellis_kernels.cute import gemm_primitives as gpu
from trellis_kernels.cute.keys import VALUE_BYTES
from trellis_kernels.cute.moe_key import MoeSmallKey

__all__ = ["MoeArguments", "expert_of", "live_routes", "load_value"]


class MoeArguments(NamedTuple):
    """Arguments of a layer: addresses, then numbers.

    x               `[tokens, hidden]`
    ids             `[tokens, top_k]`, of experts
    weights         `[tokens, top_k]`, of the router
    g_map           local expert of each id
    words           codes of all linears
    g_table         the codebook's table
    descriptors     first word and 2K of each linear
    input_scales    suh of gate and up, `middle_scales` their svh and suh of down, `output_scales` svh of down
    gate_bias       and the other biases, 0 for none
    out             `[tokens, hidden]`
    scratch         of `scratch_nbytes(key, max_tokens)` bytes
    max_tokens      capacity
    groups, blocks  of the launches that are not direct: most groups, thread blocks that route
    map_length      ids that there are, `map_bytes` those of a value of the map, 0 for none
    experts         local experts
    factor          of every router weight
    """

    x: Int64
    ids: Int64
    weights: Int64
    g_map: Int64
    words: Int64
    g_table: Int64
    descriptors: Int64
    input_scales: Int64
    middle_scales: Int64
    output_scales: Int64
    gate_bias: Int64
    up_bias: Int64
    down_bias: Int64
    out: Int64
    scratch: Int64
    tokens: Int32
    max_tokens: Int32
    groups: Int32
    blocks: Int32
    map_length: Int32
    map_bytes: Int32
    experts: Int32
    factor: Float32


# Helpers below are plain Python that runs once, at trace time: their loops are unrolled code.


def expert_of(args: MoeArguments, route: Int32, key: MoeSmallKey) -> Int32:
    """The local expert of a route, -1 if there is none."""
    words = gpu.load_words(args.ids + Int64(route) * key.id_bytes, key.id_bytes // 4)
    high = words[-1] if key.id_bytes == 8 else Uint32(0)
    return gpu.local_id(words[0], high, args.g_map, args.map_length, args.map_bytes, args.experts)


def live_routes(args: MoeArguments, token: Int32, key: MoeSmallKey) -> Uint32:
    """A bit for each slot of a token that has an expert."""
    mask = Uint32(0)
    for slot in range(key.top_k):
        mask = mask | (Uint32(expert_of(args, token * key.top_k + slot, key) >= 0) << slot)
    return mask


def load_value(table: Int64, index: Any, dtype: str) -> Float32:
    """One value of an array of a dtype, in fp32."""
    if dtype == "float32":
        return gpu.load_floats(table + Int64(index) * 4, 1)[0]
    return gpu.float_from(gpu.load_half(table + Int64(index) * VALUE_BYTES[dtype]), dtype, 0)
