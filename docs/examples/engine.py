"""An engine's side of the launch API: open, plan, prepare, freeze, bind and run the routed experts of a model.

python docs/examples/engine.py tests/data/checkpoints/tiny_3_mul1
"""

from __future__ import annotations

import sys

import torch

import trellis_moe
from trellis_format import open_layer_source
from trellis_format.reference import moe_forward
from trellis_prep import TrellisStaging, rank_extent


class Experts:
    """The routed experts of some layers; `world` ranks share their intermediate axis, and this is one of them."""

    def __init__(
        self, path: str, layers: range, capacity: trellis_moe.ExecutionCapacity, rank: int, world: int
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        described = [open_layer_source(path, layer) for layer in layers]  # headers only: nothing is read yet
        plans = []
        for source, _ in described:
            extent = rank_extent(source.geometry.padded_intermediate_size, rank, world)
            law = trellis_moe.ActivationSpec(nonlinearity=source.activation, io_dtype="bfloat16")
            share = trellis_moe.plan_weights(source, extent)
            plans.append(trellis_moe.plan_execution(share, activation=law, capacity=capacity, device=device))
        trellis_moe.Session().prepare(plans)  # every kernel is compiled now, and none later
        scratch = torch.empty(max(plan.required_nbytes() for plan in plans), dtype=torch.uint8, device=device)
        staging = TrellisStaging(max_bytes=64 << 20)  # the host memory that loading may take
        self.bindings = []
        for plan, (_, weights) in zip(plans, described, strict=True):
            prepared = trellis_moe.prepare_weights(plan.weights, weights, device=device, staging=staging)
            self.bindings.append(trellis_moe.bind(plan, prepared, scratch))  # layers take turns in one scratch

    def run(self, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Write the rank's partial sum; it launches and no more, so that a CUDA graph can hold it."""
        self.bindings[layer].run(x, ids, weights, out=out)


def main(path: str) -> float:
    """Two ranks, here one after the other, against float64; returns the relative L2 error."""
    source, arrays = open_layer_source(path, 0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, source.geometry.hidden_size, generator=generator).to(torch.bfloat16)
    weights, ids = torch.rand(5, source.geometry.num_experts, generator=generator).topk(2)
    parts = []
    for rank in range(2):
        experts = Experts(path, range(1), trellis_moe.ExecutionCapacity(max_tokens=8, top_k=2), rank, world=2)
        on_device = [tensor.to(experts.bindings[0].experts.device) for tensor in (x, ids, weights)]
        out = torch.empty(x.shape, device=on_device[0].device)
        experts.run(0, *on_device, out)
        parts.append(out.cpu())
    expected = torch.from_numpy(moe_forward(source, arrays, x.double().numpy(), ids.numpy(), weights.numpy()))
    return float((sum(parts) - expected).norm() / expected.norm())  # the sum is an all-reduce, between processes


if __name__ == "__main__":
    print(f"relative L2 to the float64 reference: {main(sys.argv[1]):.0e}")
