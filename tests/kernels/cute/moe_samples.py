"""Owns the layers, routes and launches that the tests of the few-token kernels share.  It must not assert."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from trellis_format.files.arrays import MemoryArray
from trellis_format.reference import moe_forward
from trellis_format.source import TrellisWeights
from trellis_kernels.bench.layers import random_experts, random_source
from trellis_kernels.cute.archs import arch_of_device
from trellis_kernels.cute.moe_key import MoeSmallKey, scratch_nbytes
from trellis_kernels.cute.moe_plan import plan_moe_small
from trellis_prep import PreparedExperts

NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclass(frozen=True, eq=False)
class Routes:
    """`x [tokens, hidden]`, `ids [tokens, top_k]`, `weights [tokens, top_k]` on the host."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    def part(self, index: Any) -> Routes:
        """Some tokens."""
        return Routes(*(tensor[index].contiguous() for tensor in (self.x, self.ids, self.weights)))


def make_experts(seed: int = 0, **options: Any) -> PreparedExperts:
    """A random layer on the host; see `random_source`."""
    settings = {"experts": 5, "hidden": 256, "intermediate": 256, "codebook": "mul1", "rates": ["3"]}
    return random_experts(random_source(**(settings | options)), device="cpu", seed=seed)


def make_routes(
    experts: PreparedExperts,
    tokens: int,
    top_k: int = 3,
    *,
    dtype: torch.dtype = torch.float16,
    id_dtype: torch.dtype = torch.int64,
    weight_dtype: torch.dtype = torch.float32,
    seed: int = 1,
) -> Routes:
    """Random tokens; a token may take an expert twice, and some routes are none."""
    generator = torch.Generator().manual_seed(seed)
    geometry = experts.source.geometry
    return Routes(
        torch.randn(tokens, geometry.hidden_size, generator=generator).to(dtype),
        torch.randint(-1, geometry.num_experts, (tokens, top_k), generator=generator).to(id_dtype),
        (torch.rand(tokens, top_k, generator=generator) + 0.1).to(weight_dtype),
    )


def routes_of_counts(experts: PreparedExperts, counts: list[int], **options: Any) -> Routes:
    """One route a token, expert e taking `counts[e]` of them in shuffled order."""
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    ids = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(7))]
    routes = make_routes(experts, ids.numel(), 1, **options)
    return replace(routes, ids=ids[:, None].contiguous())


def expected(experts: PreparedExperts, routes: Routes) -> torch.Tensor:
    """`[tokens, hidden] float64` by the float64 reference of trellis-format, on the host's experts."""
    source = experts.source
    geometry = source.geometry
    codes = tuple(
        tuple(MemoryArray(experts.tiles(expert, index)[0].numpy()) for index in range(len(geometry.projections)))
        for expert in range(geometry.num_experts)
    )
    weights = TrellisWeights(
        codes=codes,
        rate=source.rates.rate_bytes(),
        input_scales=experts.input_scales[0 if source.shared_input_scales else slice(None)].numpy(),
        intermediate_scales=experts.intermediate_scales.numpy(),
        output_scales=experts.output_scales[0 if source.shared_output_scales else slice(None)].numpy(),
        biases={projection: bias.numpy() for projection, bias in experts.biases.items()},
    )
    y = moe_forward(source, weights, routes.x.double().numpy(), routes.ids.numpy(), routes.weights.double().numpy())
    return torch.from_numpy(np.asarray(y))


def to_device(experts: PreparedExperts) -> PreparedExperts:
    """The same layer on the GPU."""
    return PreparedExperts.of(experts.layout, {name: tensor.cuda() for name, tensor in experts.tensors.items()})


def make_key(
    experts: PreparedExperts, routes: Routes, *, out_dtype: torch.dtype = torch.float32, **changes: Any
) -> MoeSmallKey:
    """The planned key for these routes, some fields changed."""
    key = plan_moe_small(
        experts.source,
        arch=arch_of_device(0).name,
        max_tokens=routes.x.shape[0],
        top_k=routes.ids.shape[1],
        multiprocessors=132,
        x_dtype=NAMES[routes.x.dtype],
        out_dtype=NAMES[out_dtype],
        weight_dtype=NAMES[routes.weights.dtype],
        id_bytes=routes.ids.element_size(),
    )
    return replace(key, **changes)


class Launch:
    """One layer on the GPU with its poisoned scratch and output."""

    def __init__(self, experts: PreparedExperts, key: MoeSmallKey, max_tokens: int) -> None:
        from trellis_kernels.cute.moe_small import MoeSmall

        self.experts, self.key = to_device(experts), key
        self.scratch = torch.empty(scratch_nbytes(key, max_tokens), dtype=torch.uint8, device="cuda")
        self.function = MoeSmall(self.experts, key=key, max_tokens=max_tokens, scratch=self.scratch)

    def __call__(self, routes: Routes, expert_map: torch.Tensor | None = None) -> torch.Tensor:
        """The result on the host."""
        self.scratch.fill_(0xFF)
        moved = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
        dtype = {name: kind for kind, name in NAMES.items()}[self.key.out_dtype]
        out = torch.full((routes.x.shape[0], self.key.hidden), float("nan"), dtype=dtype, device="cuda")
        self.launch(*moved, out, expert_map)
        return out.cpu()

    def launch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        expert_map: torch.Tensor | None = None,
    ) -> None:
        """On device tensors."""
        self.function(x, ids, weights, out, expert_map=expert_map, factor=self.experts.source.up_divisor)


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2; NaN if anything is."""
    return float((found.double() - truth).norm() / truth.norm())
