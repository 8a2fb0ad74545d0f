"""One layer on as many ranks as torchrun starts, by channels and by experts: each reads, holds and runs its own share.

torchrun --nproc-per-node 3 docs/examples/tensor_parallel.py tests/data/checkpoints/tiny_3_mul1
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from trellis_format import open_layer_source
from trellis_format.reference import moe_forward
from trellis_moe import ExecutionCapacity
from trellis_moe.module import TrellisMoE
from trellis_moe.parallel import expert_grid, open_groups


def main(path: str) -> None:
    """Run the same tokens on every rank, and hold the results to the float64 reference on the first."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    source, weights = open_layer_source(path, 0)
    capacity = ExecutionCapacity(max_tokens=8, top_k=2)
    ranks = dist.get_world_size()
    by_experts = open_groups(expert_grid(source, ranks), dist.group.WORLD)  # once, for all layers of a model
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, source.geometry.hidden_size, generator=generator).to(torch.bfloat16)
    scores, ids = torch.rand(5, source.geometry.num_experts, generator=generator).topk(2)
    expected = torch.from_numpy(moe_forward(source, weights, x.double().numpy(), ids.numpy(), scores.numpy()))
    for shared, group in (("channels", dist.group.WORLD), ("experts", by_experts)):
        experts = TrellisMoE(source, weights, capacity=capacity, device=device, group=group)
        y = experts(x.to(device), ids.to(device), scores.to(device)).cpu()
        if dist.get_rank() == 0:
            error = float((y - expected).norm() / expected.norm())
            print(f"{ranks} ranks share {shared}, {experts.extra_repr()}: error {error:.0e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
