"""Owns random expert layers, and the float64 forward that measurements are checked with.  It must not know timing.

Any bits are legal codes.  Scales keep activations of order one, so that float16 operands lose what they usually lose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from trellis_format.activations import Activation
from trellis_format.extent import TrellisExtent
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource
from trellis_kernels.cpu.activate import activate
from trellis_kernels.cpu.decode import decode
from trellis_prep import PreparedExperts, plan_layout

__all__ = ["float64_forward", "random_experts", "random_source"]


def random_source(
    *,
    experts: int,
    hidden: int,
    intermediate: int,
    codebook: str,
    rates: Sequence[str],
    activation: Activation = Activation("silu"),  # noqa: B008  # frozen
    biased: bool = False,
    shared: bool = False,
    joint: bool = False,
    up_divisor: float = 1.0,
) -> TrellisSource:
    """A layer's description; widths are true ones, stored in the next multiples of 128.

    Args:
        experts: how many.
        hidden: hidden channels.
        intermediate: intermediate channels.
        codebook: its name.
        rates: K of the linears, taken in turn over experts and projections.
        activation: the law; one without a gate makes experts without a gate.
        biased: whether every linear has a bias.
        shared: whether experts share input and output vectors.
        joint: whether gate and up share the input vector.
        up_divisor: see `TrellisSource`.
    """
    projections = tuple(Projection) if activation.gated else (Projection.UP, Projection.DOWN)
    count = len(projections)
    padded = [-(-size // HADAMARD_BLOCK) * HADAMARD_BLOCK for size in (hidden, intermediate)]
    table = [[Rate.of(rates[(expert * count + p) % len(rates)]) for p in range(count)] for expert in range(experts)]
    return TrellisSource(
        codebook=codebook,
        geometry=ExpertGeometry(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
            padded_hidden_size=padded[0],
            padded_intermediate_size=padded[1],
            projections=projections,
        ),
        rates=RateTable.of(table),
        layout=CodeLayout.EXL3_LINEAR,
        extent=TrellisExtent.whole(padded[1]),
        shared_input_scales=shared,
        joint_input_scales=joint and activation.gated,
        shared_output_scales=shared,
        biased=projections if biased else (),
        up_divisor=up_divisor,
        activation=activation,
    )


def random_experts(source: TrellisSource, *, device: torch.device | str, seed: int = 0) -> PreparedExperts:
    """A layer of noise on a device.

    Args:
        source: its description.
        device: where.
        seed: of the random numbers.
    """
    layout = plan_layout(source)
    generator = torch.Generator(device).manual_seed(seed)
    sizes = {"input_scales": 1.0, "output_scales": 1.0}
    tensors = {}
    for spec in layout.tensors:
        if spec.name == "codes":
            tensors[spec.name] = torch.randint(
                -(2**31), 2**31, spec.shape, dtype=torch.int32, device=device, generator=generator
            )
        elif spec.name == "descriptors":
            pairs = torch.stack((torch.tensor(layout.offsets), torch.tensor(layout.half_bits)), dim=-1)
            tensors[spec.name] = pairs.contiguous().to(device)
        else:
            random = torch.rand(spec.shape, device=device, generator=generator) + 0.5
            sign = 1 - 2 * torch.randint(0, 2, spec.shape, device=device, generator=generator)
            tensors[spec.name] = (random * sign * sizes.get(spec.name, 0.5)).half()
    middle = tensors["intermediate_scales"]
    middle[:, :-1] *= 2 * source.geometry.padded_hidden_size**-0.5
    middle[:, -1] *= 2 * source.extent.width**-0.5
    return PreparedExperts.of(layout, tensors)


def float64_forward(
    experts: PreparedExperts,
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    factor: float = 1.0,
) -> torch.Tensor:
    """The routed experts of a layer on the device of the experts, exact codes and float64 products.

    Args:
        experts: the layer.
        x: `[tokens, hidden]`.
        topk_ids: `[tokens, top_k]`.
        topk_weights: `[tokens, top_k]`.
        factor: multiplies every router weight.

    Returns:
        `[tokens, hidden] float64`.
    """
    source = experts.source
    geometry = source.geometry
    padded = torch.zeros(x.shape[0], geometry.padded_hidden_size, dtype=torch.float64, device=x.device)
    padded[:, : x.shape[1]] = x.double()
    total = torch.zeros_like(padded)
    for expert in sorted(set(topk_ids.reshape(-1).tolist())):
        if not 0 <= expert < geometry.num_experts:
            continue
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        rows = _expert(experts, padded[token], expert)
        total.index_add_(0, token, rows * (topk_weights[token, slot].double() * factor)[:, None])
    return total[:, : geometry.hidden_size]


def _expert(experts: PreparedExperts, x: torch.Tensor, expert: int) -> torch.Tensor:
    source = experts.source
    inputs = experts.input_scales[0 if source.shared_input_scales else expert].double()
    outputs = experts.output_scales[0 if source.shared_output_scales else expert].double()
    middle = experts.intermediate_scales[expert].double()
    branches = {}
    projections = source.geometry.projections
    for index, projection in enumerate(projections[:-1]):
        y = _hadamard(_hadamard(x * inputs[index % len(inputs)]) @ _matrix(experts, expert, index)) * middle[index]
        if projection in experts.biases:
            y = y + experts.biases[projection][expert].double()
        branches[projection] = y
    joined = _joined(branches, source.activation)
    y = _hadamard(_hadamard(joined * middle[-1]) @ _matrix(experts, expert, len(projections) - 1)) * outputs
    return y + experts.biases[Projection.DOWN][expert].double() if Projection.DOWN in experts.biases else y


def _joined(branches: dict[Projection, torch.Tensor], law: Activation | None) -> torch.Tensor:
    gate, up = branches.get(Projection.GATE), branches[Projection.UP]
    if law is None or (law.kind == "silu" and math.isinf(law.limit)):
        assert gate is not None
        return gate * torch.sigmoid(gate) * up
    out = torch.empty_like(up, dtype=torch.float32)
    return activate(None if gate is None else gate.float(), up.float(), activation=law, out=out).double()


def _matrix(experts: PreparedExperts, expert: int, projection: int) -> torch.Tensor:
    codes, rate = experts.tiles(expert, projection)
    out = torch.empty(codes.shape[0] * 16, codes.shape[1] * 16, dtype=torch.float32, device=codes.device)
    return decode(codes, codebook=experts.source.codebook, rate=rate, out=out).double()


def _hadamard(values: torch.Tensor) -> torch.Tensor:
    result = values.reshape(-1, HADAMARD_BLOCK)
    half = 1
    while half < HADAMARD_BLOCK:
        pairs = result.view(-1, HADAMARD_BLOCK // (2 * half), 2, half)
        result = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        half *= 2
    return result.reshape(values.shape) / math.sqrt(HADAMARD_BLOCK)
