"""Owns the layers, routes and launches that the tests of trellis-moe share.  It must not assert.

Codes are random bits, which are all legal; scales keep activations of order one, so that float16 operands lose what
they usually lose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from trellis_format.activations import Activation
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.reference import moe_forward
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_kernels.layers import DeviceLimits
from trellis_moe import (
    ActivationSpec,
    Binding,
    ExecutionCapacity,
    ExecutionPlan,
    bind,
    plan_execution,
    plan_weights,
    prepare_weights,
)
from trellis_moe.specs import io_dtype_name

BOUNDS = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-3}
"""Relative L2 to the float64 reference, by dtype of x."""
LAWS = (
    Activation("silu"),
    Activation("silu", limit=0.75),
    Activation("gelu_tanh"),
    Activation("situ"),
    Activation("swigluoai", limit=1.5, alpha=1.702, beta=1.0),
    Activation("relu2"),
)
"""Every activation, limits so low that they bite."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer in memory."""

    source: TrellisSource
    weights: TrellisWeights


@dataclass(frozen=True, eq=False)
class Routes:
    """An input: `x [tokens, hidden]`, `ids [tokens, top_k] int64`, `weights [tokens, top_k] float32`."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def part(self, index: Any) -> Routes:
        """Some tokens, contiguous."""
        return Routes(*(tensor[index].contiguous() for tensor in (self.x, self.ids, self.weights)))


def make_layer(
    *,
    experts: int = 5,
    hidden: int = 256,
    intermediate: int = 384,
    codebook: str = "mul1",
    rates: Sequence[str] = ("3",),
    activation: Activation | None = LAWS[0],
    biased: bool = False,
    up_divisor: float = 1.0,
    shared: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer; widths are true ones and stored in the next multiples of 128.

    Args:
        experts: how many.
        hidden: hidden channels.
        intermediate: intermediate channels.
        codebook: its name.
        rates: K of the linears, taken in turn over experts and projections.
        activation: the law; one without a gate makes experts without a gate.
        biased: whether every linear has a bias.
        up_divisor: see `TrellisSource`.
        shared: whether experts share input and output vectors, and gate and up the input vector.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    gated = activation is None or activation.gated
    projections = tuple(Projection) if gated else (Projection.UP, Projection.DOWN)
    count, h, i = len(projections), -(-hidden // 128) * 128, -(-intermediate // 128) * 128
    geometry = ExpertGeometry(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        padded_hidden_size=h,
        padded_intermediate_size=i,
        projections=projections,
    )
    table = [[Rate.of(rates[(expert * count + p) % len(rates)]) for p in range(count)] for expert in range(experts)]
    inputs, axis = (1 if shared or not gated else 2), (() if shared else (experts,))
    source = TrellisSource(
        codebook=codebook,
        geometry=geometry,
        rates=RateTable.of(table),
        layout=CodeLayout.EXL3_LINEAR,
        extent=TrellisExtent.whole(i),
        shared_input_scales=shared,
        joint_input_scales=shared and gated,
        shared_output_scales=shared,
        biased=projections if biased else (),
        up_divisor=up_divisor,
        activation=activation,
    )
    intermediate_scales = signs(rng, (experts, count, i), h**-0.5)
    intermediate_scales[:, -1] = signs(rng, (experts, i), i**-0.5)
    weights = TrellisWeights(
        codes=tuple(
            tuple(MemoryArray(tiles(rng, geometry.matrix(p), row[index])) for index, p in enumerate(projections))
            for row in table
        ),
        rate=source.rates.rate_bytes(),
        input_scales=signs(rng, (*axis, inputs, h), 1.0),
        intermediate_scales=intermediate_scales,
        output_scales=signs(rng, (*axis, h), 1.0),
        biases={p: signs(rng, (experts, geometry.matrix(p)[1]), 0.5) for p in source.biased},
    )
    return Layer(source, weights)


def tiles(rng: np.random.Generator, matrix: tuple[int, int], rate: Rate) -> npt.NDArray[np.int16]:
    """`[k_tiles, n_tiles, 16*K] int16` of noise for a (k, n) matrix."""
    return rng.integers(-(2**15), 2**15, (matrix[0] // 16, matrix[1] // 16, rate.tile_words16), dtype=np.int16)


def signs(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> npt.NDArray[np.float16]:
    """Float16 of random sign and a magnitude around `size`."""
    return (rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 1.5, shape) * size).astype(np.float16)


def make_routes(layer: Layer, tokens: int, top_k: int, *, dtype: torch.dtype = torch.float16, seed: int = 1) -> Routes:
    """Random tokens; a token may take an expert twice, and some routes are none (-1)."""
    generator = torch.Generator().manual_seed(seed)
    geometry = layer.source.geometry
    return Routes(
        torch.randn(tokens, geometry.hidden_size, generator=generator).to(dtype),
        torch.randint(-1, geometry.num_experts, (tokens, top_k), generator=generator),
        torch.rand(tokens, top_k, generator=generator) + 0.1,
    )


def make_plan(
    layer: Layer,
    *,
    tokens: int = 9,
    top_k: int = 3,
    dtype: torch.dtype = torch.float16,
    extent: TrellisExtent | None = None,
    device: torch.device | str = "cpu",
    limits: DeviceLimits | None = None,
    reference: bool | None = None,
    **activation: Any,
) -> ExecutionPlan:
    """A plan of the layer's own law."""
    assert layer.source.activation is not None
    return plan_execution(
        plan_weights(layer.source, extent),
        activation=ActivationSpec(nonlinearity=layer.source.activation, io_dtype=io_dtype_name(dtype), **activation),
        capacity=ExecutionCapacity(max_tokens=tokens, top_k=top_k),
        device=device,
        limits=limits,
        reference=reference,
    )


def make_binding(layer: Layer, plan: ExecutionPlan, *, fill: int = 0xFF) -> Binding:
    """A binding whose scratch is filled with one byte."""
    experts = prepare_weights(plan.weights, layer.weights, device=plan.device_type)
    scratch = torch.full((plan.required_nbytes(),), fill, dtype=torch.uint8, device=plan.device_type)
    return bind(plan, experts, scratch)


def launch(binding: Binding, routes: Routes) -> torch.Tensor:
    """Run into a poisoned output, on the binding's device; the result is on the CPU."""
    device = binding.experts.device
    dtype = getattr(torch, binding.plan.activation.output_dtype)
    out = torch.full(routes.x.shape, float("nan"), dtype=dtype, device=device)
    result = binding.run(routes.x.to(device), routes.ids.to(device), routes.weights.to(device), out=out)
    assert result is out
    return out.cpu()


def run(layer: Layer, routes: Routes, *, extent: TrellisExtent | None = None, **options: Any) -> torch.Tensor:
    """Plan, prepare, bind and run over routes."""
    tokens, top_k = routes.ids.shape
    plan = make_plan(layer, tokens=max(tokens, 1), top_k=top_k, dtype=routes.x.dtype, extent=extent, **options)
    return launch(make_binding(layer, plan), routes)


def truth(layer: Layer, routes: Routes, *, extent: TrellisExtent | None = None) -> torch.Tensor:
    """The float64 reference, `[tokens, hidden]`."""
    arrays = (routes.x.double().numpy(), routes.ids.numpy(), routes.weights.double().numpy())
    return torch.from_numpy(moe_forward(layer.source, layer.weights, *arrays, extent=extent))


def distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative L2: norm of the difference over the norm of the reference."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, so that a comparison is of bits."""
    return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


def with_weights(layer: Layer, **changes: Any) -> Layer:
    """The layer with other arrays."""
    return Layer(layer.source, replace(layer.weights, **changes))


def write_input(path: Path, **tensors: torch.Tensor) -> Path:
    """An input file of `trellis-moe run`."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path
