"""Owns the launch of a layer for many tokens: its steps, chunk by chunk and window by window, in a caller's scratch.

It must not know execution plans or routing beyond ids and weights.  Nothing here waits for the device, so a launch can
be captured; what work there is, kernels find out on the device.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch

from trellis_format.source import Projection
from trellis_kernels.arguments import check_topk_ids
from trellis_kernels.bank import code_banks
from trellis_kernels.checks import check_device, check_dtype, check_shape
from trellis_kernels.cute.launch import DTYPE_NAMES
from trellis_kernels.cute.prefill import (
    Window,
    add_rows,
    clear_sums,
    copy_sums,
    down_rows,
    join_rows,
    make_blocks,
    make_image,
    sum_rows,
)
from trellis_kernels.cute.prefill_key import ENTRY_CODES, ENTRY_WORDS
from trellis_kernels.cute.prefill_plan import SCRATCH_ALIGNMENT, PrefillPlan
from trellis_kernels.cute.prefill_share import PANEL_CHANNELS, ROW_GROUP
from trellis_kernels.cute.route_pack import pack_into
from trellis_kernels.errors import KernelTypeError, KernelValueError
from trellis_kernels.routes import PackedRoutes
from trellis_prep import PreparedExperts

__all__ = ["PrefillLayer"]

_MOST_CODE_WORDS = 4 << 31  # row blocks say where codes start in units of 16 bytes, by 31 bits
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class PrefillLayer:
    """A layer with its plan and scratch fixed, which launches for any tokens up to the plan's capacity.

    In an ordered reduction a row's bits depend on its own token, experts and weights alone, not on its place in the
    batch, on the other rows, or on how the plan cuts the work.  Launches that share a scratch must be ordered by their
    streams.

    Args:
        experts: the layer, on a CUDA device.
        plan: its plan.
        scratch: `[bytes] uint8`, at least `plan.scratch_nbytes`, 256-byte aligned, with any content.

    Raises:
        KernelTypeError: if a dtype or device is wrong.
        KernelValueError: if a size or alignment is wrong, or the experts are not those of the plan.
    """

    def __init__(self, experts: PreparedExperts, *, plan: PrefillPlan, scratch: torch.Tensor) -> None:
        _check_experts(experts, plan)
        _check_scratch(experts, plan, scratch)
        self.experts, self.plan, self.scratch = experts, plan, scratch
        self._banks = code_banks(experts)
        self._parts = _carve(plan, scratch)
        self._packed = PackedRoutes(
            ROW_GROUP,
            *(
                self._parts[name].view(torch.int32)
                for name in ("route_indices", "block_experts", "packed_count", "expert_offsets", "expert_counts")
            ),
        )

    def __call__(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        *,
        expert_map: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Launch on the current stream of the device.

        Args:
            x: `[tokens, hidden]`, the plan's `x_dtype`, contiguous, 16-byte aligned.
            topk_ids: `[tokens, top_k] int32 or int64`, contiguous; an id that is no expert of the rank adds nothing.
            topk_weights: `[tokens, top_k]`, the plan's `weight_dtype`, contiguous.
            out: `[tokens, hidden]`, the plan's `out_dtype`, contiguous, 16-byte aligned, written whole.
            expert_map: `[global experts] int32 or int64`, contiguous, local expert of each global id, -1 for none; None
                is the identity.
            factor: multiplies every router weight.

        Returns:
            `out`.

        Raises:
            KernelTypeError: if a dtype or device is wrong.
            KernelValueError: if a shape, stride or alignment is wrong, or there are more tokens than the capacity.
            ColdKernelError: if a kernel is not ready and may not be compiled, frozen or under capture.
        """
        plan = self.plan
        self._check(x, topk_ids, topk_weights, out)
        check_topk_ids(topk_ids, expert_map)
        if expert_map is not None and not expert_map.is_contiguous():
            raise KernelValueError(f"expert_map must be contiguous, got strides {expert_map.stride()}")
        for first in range(0, x.shape[0], plan.chunk_tokens):
            chunk = slice(first, min(first + plan.chunk_tokens, x.shape[0]))
            self._run_chunk(x[chunk], topk_ids[chunk], topk_weights[chunk], out[chunk], expert_map, factor)
        return out

    def _run_chunk(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        expert_map: torch.Tensor | None,
        factor: float,
    ) -> None:
        plan = self.plan
        routes = topk_ids.numel()
        if plan.reduction == "atomic":
            clear_sums(self._sums, x.shape[0])
        pack_into(topk_ids, self._packed, self._parts["pack_work"].view(torch.int32), expert_map=expert_map)
        for first, slots in plan.windows(routes):
            self._run_window(x, Window(first, slots), routes, topk_weights, factor, plan.engine_for(routes))
        if plan.reduction == "atomic":
            copy_sums(self._sums, out)
            return
        sum_rows(
            self._rows,
            topk_ids,
            topk_weights,
            num_experts=plan.num_experts,
            expert_map=expert_map,
            factor=factor,
            out=out,
        )

    @property
    def _rows(self) -> torch.Tensor:
        return self._parts["rows"].view(torch.float16).view(-1, self.plan.padded_hidden)

    @property
    def _sums(self) -> torch.Tensor:
        return self._parts["sums"].view(torch.float32).view(-1, self.plan.padded_hidden)

    def _run_window(
        self, x: torch.Tensor, window: Window, routes: int, topk_weights: torch.Tensor, factor: float, engine: str
    ) -> None:
        plan, experts, packed = self.plan, self.experts, self._packed
        entries = self._parts["entries"].view(torch.int32).view(-1, ENTRY_WORDS)
        count = self._parts["entry_count"].view(torch.int32)
        images = tuple(self._image(f"image_{index}") for index in range(plan.images))
        joined = self._image("joined")
        *ups, down = self._banks
        inputs = tuple(experts.input_scales[:, index] for index in range(plan.images))
        make_image(x, packed, inputs, images, window, route_count=routes, routes_per_row=plan.top_k)
        names = experts.source.geometry.projections
        for rates in plan.up_rates:
            # one cut of the rows serves all linears where every expert has the same rates
            cut = (*ups, down) if plan.is_uniform else tuple(ups)
            blocks = make_blocks(
                packed, cut, (*rates, *plan.down_rates)[: len(cut)], window, entries, count, engine=engine
            )
            join_rows(
                tuple(ups),
                images,
                replace(blocks, half_bits=rates),
                packed,
                scales=tuple(experts.intermediate_scales[:, index] for index in range(len(ups))),
                biases=tuple(experts.biases.get(name) for name in names[:-1]),
                input_scales=experts.intermediate_scales[:, len(ups)],
                activation=plan.activation,
                stash=self._parts.get("stash"),
                engine=engine,
                out=joined,
            )
        for rate in plan.down_rates:
            if plan.is_uniform:
                blocks = replace(blocks, half_bits=(rate,), code_place=ENTRY_CODES + 2)
            else:
                blocks = make_blocks(packed, (down,), (rate,), window, entries, count, engine=engine)
            scales, bias = experts.output_scales, experts.biases.get(Projection.DOWN)
            if plan.reduction == "atomic":
                add_rows(
                    down,
                    joined,
                    blocks,
                    packed,
                    scales=scales,
                    bias=bias,
                    weights=topk_weights,
                    factor=factor,
                    dtype=_DTYPES[plan.out_dtype],
                    engine=engine,
                    out=self._sums,
                )
            else:
                down_rows(down, joined, blocks, packed, scales=scales, bias=bias, engine=engine, out=self._rows)

    def _image(self, name: str) -> torch.Tensor:
        return self._parts[name].view(torch.float16).view(-1, self.plan.window_slots, PANEL_CHANNELS)

    def _check(self, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, out: torch.Tensor) -> None:
        plan, device = self.plan, self.experts.device
        tokens = x.shape[0] if x.ndim else 0
        check_dtype("x", x, _DTYPES[plan.x_dtype])
        check_dtype("out", out, _DTYPES[plan.out_dtype])
        check_dtype("topk_weights", topk_weights, _DTYPES[plan.weight_dtype])
        named = {"x": x, "out": out, "topk_ids": topk_ids, "topk_weights": topk_weights}
        check_device(device, **named)
        for name, tensor in named.items():
            check_shape(name, tensor, tokens, plan.hidden if name in ("x", "out") else plan.top_k)
            if not tensor.is_contiguous():
                raise KernelValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        for name, tensor in (("x", x), ("out", out)):
            if tensor.data_ptr() % 16:
                past = tensor.data_ptr() % 16
                raise KernelValueError(f"{name} must start at a multiple of 16 bytes, got {past} past one")
        if tokens > plan.max_tokens:
            raise KernelValueError(f"{tokens} tokens do not fit a capacity of {plan.max_tokens}")


def _carve(plan: PrefillPlan, scratch: torch.Tensor) -> dict[str, torch.Tensor]:
    """Each part of the scratch as bytes."""
    sizes = plan.scratch_parts
    aligned = [-(-nbytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT for nbytes in sizes.values()]
    firsts = itertools.accumulate(aligned, initial=0)
    return {name: scratch[first : first + nbytes] for (name, nbytes), first in zip(sizes.items(), firsts, strict=False)}


def _check_scratch(experts: PreparedExperts, plan: PrefillPlan, scratch: torch.Tensor) -> None:
    check_dtype("scratch", scratch, torch.uint8)
    check_device(experts.device, scratch=scratch)
    check_shape("scratch", scratch, None)
    if scratch.numel() < plan.scratch_nbytes:
        raise KernelValueError(f"scratch has {scratch.numel()} bytes; the plan needs {plan.scratch_nbytes}")
    if scratch.data_ptr() % SCRATCH_ALIGNMENT:
        past = scratch.data_ptr() % SCRATCH_ALIGNMENT
        raise KernelValueError(f"scratch must start at a multiple of {SCRATCH_ALIGNMENT} bytes, got {past} past one")


def _check_experts(experts: PreparedExperts, plan: PrefillPlan) -> None:
    if experts.device.type != "cuda":
        raise KernelTypeError(f"the experts must be on a CUDA device, got {experts.device}")
    if experts.codes.numel() > _MOST_CODE_WORDS:
        raise KernelValueError(f"{experts.codes.numel()} words of codes: at most {_MOST_CODE_WORDS} are addressed")
    source, geometry = experts.source, experts.source.geometry
    rates = [tuple(row) for row in experts.layout.half_bits.tolist()]
    found = {
        "codebook": source.codebook,
        "hidden": geometry.hidden_size,
        "padded_hidden": geometry.padded_hidden_size,
        "width": experts.extent.width,
        "num_experts": geometry.num_experts,
        "up_rates": tuple(sorted({row[:-1] for row in rates})),
        "down_rates": tuple(sorted({row[-1] for row in rates})),
        "joint_inputs": source.joint_input_scales,
        "biased": tuple(name in experts.biases for name in geometry.projections),
    }
    for name, value in found.items():
        if getattr(plan, name) != value:
            raise KernelValueError(f"the plan has {name} = {getattr(plan, name)}, the experts {value}")
