"""Owns the layers of a soak: random weights, plans, bindings in one arena, and the outputs that runs must repeat.

It must not know what is run when.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trellis_format.activations import Activation
from trellis_format.source import TrellisSource
from trellis_kernels.bench.layers import float64_forward, random_experts, random_source
from trellis_kernels.layers import DeviceLimits
from trellis_moe.binding import Binding, bind
from trellis_moe.plan import ExecutionPlan, plan_execution, plan_weights
from trellis_moe.specs import ActivationSpec, ExecutionCapacity
from trellis_prep import PreparedExperts

__all__ = ["INPUT_SETS", "Inputs", "SoakLayer", "SoakSizes", "bind_layers", "plan_layers", "same_bits"]

INPUT_SETS = 2
"""Sets of inputs of each layer and token count."""

_KINDS: tuple[dict[str, Any], ...] = (
    {"codebook": "mul1", "rates": ["3"]},
    {"codebook": "mcg", "rates": ["4"], "biased": True, "activation": Activation.named("swigluoai")},
    {"codebook": "mul1", "rates": ["2", "2.5"], "shared": True, "joint": True},
    {"codebook": "3inst", "rates": ["2"], "activation": Activation("relu2")},
)
"""What layers are made of, in turn: codebooks, uniform and mixed rates, laws, biases, shared vectors."""


@dataclass(frozen=True, kw_only=True)
class SoakSizes:
    """Sizes of a soak.

    Args:
        layers: how many.
        experts: of a layer.
        hidden: channels.
        intermediate: channels.
        top_k: routes of a token.
        max_tokens: of a run.
        token_counts: with launches of their own.
        scratch_bound: most bytes of scratch.
    """

    layers: int = 8
    experts: int = 64
    hidden: int = 2048
    intermediate: int = 768
    top_k: int = 8
    max_tokens: int = 8192
    token_counts: tuple[int, ...] = (1, 8, 32, 128)
    scratch_bound: int = 512 << 20


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of one launch and the output that they gave.

    Attributes:
        x: `[tokens, hidden]`.
        ids: `[tokens, top_k] int64`; some are no expert.
        weights: `[tokens, top_k] float32`.
        expected: `[tokens, hidden]`.
    """

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expected: torch.Tensor


@dataclass(eq=False)
class SoakLayer:
    """A bound layer.

    Attributes:
        binding: its runs.
        inputs: sets of inputs by the tokens of a launch.
        errors: relative L2 distance to float64 of sampled tokens, by the tokens of a launch.
    """

    binding: Binding
    inputs: dict[int, list[Inputs]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)

    def learn(self, seed: int) -> None:
        """Make inputs for every launch, and keep what they give."""
        for variant in self.binding.plan.variants:
            made = [self._make(variant.tokens, seed + index) for index in range(INPUT_SETS)]
            self.inputs[variant.tokens] = made
            self.errors[variant.tokens] = max(map(self._error, made))

    def _make(self, tokens: int, seed: int) -> Inputs:
        plan, device = self.binding.plan, self.binding.experts.device
        generator = torch.Generator(device).manual_seed(seed * 1_000_003 + tokens)
        hidden, experts = plan.weights.source.geometry.hidden_size, plan.weights.source.geometry.num_experts
        x = torch.randn(tokens, hidden, device=device, generator=generator).to(torch.bfloat16)
        shape = (tokens, plan.capacity.top_k)
        ids = torch.randint(-1, experts, shape, device=device, generator=generator)
        ids[:, 0].clamp_(min=0)  # no token without an expert
        weights = torch.rand(shape, device=device, generator=generator) + 0.1
        out = torch.full_like(x, float("nan"))
        self.binding.run(x, ids, weights, out=out)
        return Inputs(x, ids, weights, out)

    def _error(self, inputs: Inputs) -> float:
        """Distance of the first and the last tokens to float64."""
        tokens = inputs.x.shape[0]
        rows = sorted({*range(min(4, tokens)), *range(max(tokens - 4, 0), tokens)})
        experts = self.binding.experts
        parts = (inputs.x[rows], inputs.ids[rows], inputs.weights[rows])
        truth = float64_forward(experts, *parts, factor=experts.source.up_divisor)
        return float((inputs.expected[rows].double() - truth).norm() / truth.norm())


def plan_layers(
    sizes: SoakSizes, device: torch.device | str, limits: DeviceLimits | None = None
) -> list[ExecutionPlan]:
    """The plan of each layer; equal sources have equal plans.

    Args:
        sizes: of the soak.
        device: where it will run.
        limits: see `plan_execution`.
    """
    plans = []
    for index in range(sizes.layers):
        kind = {"activation": Activation("silu")} | _KINDS[index % len(_KINDS)]
        source: TrellisSource = random_source(
            experts=sizes.experts, hidden=sizes.hidden, intermediate=sizes.intermediate, **kind
        )
        plans.append(
            plan_execution(
                plan_weights(source),
                activation=ActivationSpec(
                    nonlinearity=kind["activation"], io_dtype="bfloat16", output_dtype="bfloat16"
                ),
                capacity=ExecutionCapacity(
                    max_tokens=sizes.max_tokens,
                    top_k=sizes.top_k,
                    token_counts=sizes.token_counts,
                    scratch_bound=sizes.scratch_bound,
                ),
                device=device,
                limits=limits,
            )
        )
    return plans


def bind_layers(plans: list[ExecutionPlan], device: torch.device | str) -> tuple[list[SoakLayer], torch.Tensor]:
    """Random weights for each plan, all bound to one arena, and the arena."""
    arena = torch.full((max(plan.required_nbytes() for plan in plans),), 0xFF, dtype=torch.uint8, device=device)
    layers = []
    for index, plan in enumerate(plans):
        experts: PreparedExperts = random_experts(plan.weights.source, device=device, seed=index)
        layers.append(SoakLayer(bind(plan, experts, arena)))
        layers[-1].learn(seed=index)
    return layers, arena


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors of 16-bit values have the same bits."""
    return torch.equal(found.view(torch.int16), expected.view(torch.int16))
