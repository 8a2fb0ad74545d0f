"""Owns the cases that ops are measured on, and how each one's output is checked.  It must not time anything.

Expected values come from numpy over `trellis_format` in float64, on rows that are sampled from what was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from trellis_format.codebooks import CODEBOOKS
from trellis_format.hadamard import hadamard
from trellis_format.rates import TILE, Rate
from trellis_format.tiles import decode_inner
from trellis_kernels import decode, pack_routes, reduce_routes, rotate_input, rotate_output
from trellis_kernels.arguments import FULL_TABLE_CODEBOOK, FULL_TABLE_RATE
from trellis_kernels.bench.timing import Launch
from trellis_kernels.cute.keys import DecodeKey, KernelKey
from trellis_kernels.cute.op_keys import PackKey, ReduceKey, RotateKey, op_keys
from trellis_kernels.routes import PackedRoutes, empty_routes

__all__ = ["GROUPS", "OpCase", "OpSizes", "cases", "keys"]

_SAMPLED = 16  # rows that are compared; a band of tiles has as many


@dataclass(frozen=True)
class OpSizes:
    """How large the cases are.

    Args:
        decode: input and output channels of the decoded matrix.
        rates: K that are decoded.
        hidden: channels of rotated and reduced rows.
        rows: numbers of rotated rows.
        packs: (tokens, top_k, experts, rows of a block) of each packing.
        tokens: numbers of tokens of a reduction, eight routes each.
    """

    decode: tuple[int, int] = (16384, 32768)
    rates: tuple[str, ...] = ("2", "3", "4", "5", "6")
    hidden: int = 7168
    rows: tuple[int, ...] = (8, 4096)
    packs: tuple[tuple[int, int, int, int], ...] = ((4096, 16, 896, 64), (16, 8, 128, 16), (128, 8, 256, 16))
    tokens: tuple[int, ...] = (8, 1024)


@dataclass(frozen=True)
class OpCase:
    """One op on one input.

    Attributes:
        op: what is launched.
        case: on what.
        launches: the same launch on different buffers.
        moved_bytes: bytes that a launch must read and write.
        weights: weights that a launch decodes, or 0.
        error: distance of the last outputs from the expected values: a relative L2, or the share of wrong elements of
            an op whose output is exact.
        bound: most that it may be.
    """

    op: str
    case: str
    launches: Sequence[Launch]
    moved_bytes: int
    weights: int
    error: Callable[[], float]
    bound: float


def cases(group: str, sizes: OpSizes, device: torch.device) -> Iterator[OpCase]:
    """The cases of a group, one after the other, so that the buffers of one are gone when the next is made.

    Args:
        group: a key of `GROUPS`.
        sizes: how large.
        device: where.
    """
    return GROUPS[group](sizes, device)


def keys(group: str, sizes: OpSizes, arch: str) -> list[KernelKey]:
    """The kernels that the cases of a group launch on a compile target, and perhaps some that they do not."""
    if group == "decode":
        return [
            DecodeKey(arch, name, rate.half_bits, "float16")
            for name, rate in _decoded(sizes)
        ]  # fmt: skip
    kinds = {"rotate": RotateKey, "pack": PackKey, "reduce": ReduceKey}
    return [key for key in op_keys(arch) if isinstance(key, kinds[group]) and _is_launched(key)]


def _is_launched(key: KernelKey) -> bool:
    """Whether a case may launch a specialisation: blocks of 128 and 512, wide rows, bfloat16 or float32 results."""
    if isinstance(key, RotateKey):
        return key.wide and (key.side, key.out_dtype) in {("input", "float16"), ("output", "float32")}
    if isinstance(key, ReduceKey):
        return key.wide and key.weight_dtype == "float32" and key.out_dtype in ("bfloat16", "float32")
    return isinstance(key, PackKey) and key.max_experts <= 1024


def _decoded(sizes: OpSizes) -> list[tuple[str, Rate]]:
    rates = [Rate.of(text) for text in sizes.rates]
    return [(name, rate) for name, book in CODEBOOKS.items() for rate in rates if rate in book.legal_rates]


def _decode_cases(sizes: OpSizes, device: torch.device) -> Iterator[OpCase]:
    k, n = sizes.decode
    out = torch.empty(k, n, dtype=torch.float16, device=device)
    forms = [(name, rate, "auto", "") for name, rate in _decoded(sizes)]
    if str(FULL_TABLE_RATE) in sizes.rates and device.type == "cuda":
        forms.append((FULL_TABLE_CODEBOOK, FULL_TABLE_RATE, "full", ", full table"))
    for name, rate, table, note in forms:
        shape = (k // TILE, n // TILE, rate.tile_words16)
        codes = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device)
        launch = partial(decode, codes, codebook=name, rate=rate, table=table, out=out)
        moved = codes.numel() * 2 + out.numel() * 2
        error = partial(_decode_error, codes, name, rate, out)
        yield OpCase("decode", f"{name} K={rate} float16{note}", [launch], moved, k * n, error, 0.0)


def _decode_error(codes: torch.Tensor, codebook: str, rate: Rate, out: torch.Tensor) -> float:
    wrong = total = 0
    for band in {0, codes.shape[0] // 2, codes.shape[0] - 1}:
        wanted = decode_inner(codes[band : band + 1].cpu().numpy(), CODEBOOKS[codebook], rate)
        found = out[band * TILE : (band + 1) * TILE].cpu().numpy()
        wrong += int((found.view(np.uint16) != wanted.view(np.uint16)).sum())
        total += wanted.size
    return wrong / total


def _rotate_cases(sizes: OpSizes, device: torch.device) -> Iterator[OpCase]:
    hidden = sizes.hidden
    scales = torch.randn(1, hidden, device=device).half()
    for rows in sizes.rows:
        for block in (128, 512):
            for dtype in (torch.float16, torch.bfloat16):
                inputs = [torch.randn(rows, hidden, device=device).to(dtype) for _ in range(4)]
                outputs = [torch.full((rows, hidden), torch.nan, device=device).half() for _ in inputs]
                launches = [
                    partial(rotate_input, x, scales, block=block, out=out)
                    for x, out in zip(inputs, outputs, strict=True)
                ]
                error = partial(_rotate_input_error, inputs, scales, block, outputs)
                case = f"{rows} x {hidden} {str(dtype).removeprefix('torch.')} H{block}"
                yield OpCase("rotate_input", case, launches, 4 * rows * hidden, 0, error, 1e-3)
        wide = [torch.randn(rows, hidden, device=device) for _ in range(4)]
        outputs = [torch.full((rows, hidden), torch.nan, device=device) for _ in wide]
        launches = [partial(rotate_output, y, scales, out=out) for y, out in zip(wide, outputs, strict=True)]
        error = partial(_rotate_output_error, wide, scales, outputs)
        yield OpCase("rotate_output", f"{rows} x {hidden} float32", launches, 8 * rows * hidden, 0, error, 1e-5)


def _rotate_input_error(
    inputs: Sequence[torch.Tensor], scales: torch.Tensor, block: int, outputs: Sequence[torch.Tensor]
) -> float:
    wanted = [hadamard(_double(x) * _double(scales), block) for x in inputs]
    return _distance([_double(out) for out in outputs], wanted)


def _rotate_output_error(
    inputs: Sequence[torch.Tensor], scales: torch.Tensor, outputs: Sequence[torch.Tensor]
) -> float:
    wanted = [hadamard(_double(y)) * _double(scales) for y in inputs]
    return _distance([_double(out) for out in outputs], wanted)


def _pack_cases(sizes: OpSizes, device: torch.device) -> Iterator[OpCase]:
    for tokens, top_k, experts, block_rows in sizes.packs:
        ids = [torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices.to(torch.int32) for _ in range(4)]
        arenas = [empty_routes(tokens * top_k, experts, block_rows, device) for _ in ids]
        for stable in (True, False):
            launches = [
                partial(pack_routes, each, num_experts=experts, block_rows=block_rows, stable=stable, out=arena)
                for each, arena in zip(ids, arenas, strict=True)
            ]
            order = "stable" if stable else "unordered"
            case = f"{tokens * top_k} routes, {experts} experts, blocks of {block_rows}, {order}"
            error = partial(_pack_error, ids, experts, stable, arenas)
            yield OpCase("pack_routes", case, launches, 8 * tokens * top_k, 0, error, 0.0)


def _pack_error(ids: Sequence[torch.Tensor], experts: int, stable: bool, arenas: Sequence[PackedRoutes]) -> float:
    """Share of routes that are not at their place, or not in their expert's segment where there is no order."""
    wrong = total = 0
    for each, packed in zip(ids, arenas, strict=True):
        flat = each.reshape(-1).cpu().numpy()
        counts = np.bincount(flat, minlength=experts)
        slots, offsets = packed.route_indices.cpu().numpy(), packed.expert_offsets.cpu().numpy()
        order = np.argsort(flat, kind="stable")
        first = np.repeat(np.cumsum(counts) - counts, counts)
        places = np.arange(flat.size) - first + np.repeat(offsets[:-1], counts)
        found = slots[np.clip(places, 0, slots.size - 1)]
        if not stable:  # ascending inside each segment
            found = found[np.lexsort((found, flat[order]))]
        wrong += int((found != order).sum())
        total += flat.size
    return wrong / total


def _reduce_cases(sizes: OpSizes, device: torch.device) -> Iterator[OpCase]:
    hidden = sizes.hidden
    for tokens in sizes.tokens:
        inputs = [
            (torch.randn(tokens * 8, hidden, device=device), torch.rand(tokens, 8, device=device)) for _ in range(3)
        ]
        accumulator = torch.empty(tokens, hidden, device=device)
        for name, given in (("ordered", None), ("atomic", accumulator)):
            outputs = [torch.full((tokens, hidden), torch.nan, device=device).bfloat16() for _ in inputs]
            launches = [
                partial(reduce_routes, rows, weights, accumulator=given, out=out)
                for (rows, weights), out in zip(inputs, outputs, strict=True)
            ]
            moved = tokens * hidden * (8 * 4 + 2)
            case = f"{tokens} x 8 x {hidden} bfloat16, {name}"
            yield OpCase("reduce_routes", case, launches, moved, 0, partial(_reduce_error, inputs, outputs), 8e-3)


def _reduce_error(inputs: Sequence[tuple[torch.Tensor, torch.Tensor]], outputs: Sequence[torch.Tensor]) -> float:
    wanted = []
    for rows, weights in inputs:
        count = min(_SAMPLED, weights.shape[0])
        terms = rows[: count * 8].cpu().double().numpy().reshape(count, 8, -1)
        wanted.append((terms * weights[:count].cpu().double().numpy()[:, :, None]).sum(axis=1))
    return _distance([_double(out) for out in outputs], wanted)


def _double(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The sampled rows in float64."""
    return tensor[:_SAMPLED].cpu().double().numpy()


def _distance(
    found: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
    wanted: Sequence[np.ndarray[tuple[int, ...], np.dtype[np.float64]]],
) -> float:
    """The worst relative L2 of any buffer; NaN stays NaN."""
    errors = [np.linalg.norm(f - w) / np.linalg.norm(w) for f, w in zip(found, wanted, strict=True)]
    return float(np.max(errors))


GROUPS: dict[str, Callable[[OpSizes, torch.device], Iterator[OpCase]]] = {
    "rotate": _rotate_cases,
    "pack": _pack_cases,
    "reduce": _reduce_cases,
    "decode": _decode_cases,
}
"""Cases by what they measure."""
