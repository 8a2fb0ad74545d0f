"""Owns the measurement of whole layers through the launch API.  It must not know other contenders.

Layers of noise are together larger than the second-level cache and every launch has its own routes, so that weights
come from device memory as they do in a model.  Outputs are poisoned, tokens of each of them are compared with float64,
and after all replays they must be what the first launch wrote, bit for bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from trellis_kernels.bench.layers import float64_forward, random_experts
from trellis_kernels.bench.timing import Launch, Samples, eager_samples, graph_samples
from trellis_kernels.layers import DeviceLimits
from trellis_moe.bench.presets import Preset
from trellis_moe.bench.record import Recorder
from trellis_moe.binding import bind
from trellis_moe.plan import ExecutionPlan, plan_execution, plan_weights
from trellis_moe.receipts.schema import Check, LayerCase, Memory
from trellis_moe.specs import ActivationSpec, ExecutionCapacity

__all__ = ["LayerBench", "Prepared", "Work", "plan_layer"]

_LAYER_BYTES = 600 << 20  # of weights, so that a launch finds none of its own in the second-level cache
_TURNS = ((128, 16), (1024, 4))  # (tokens up to, inputs that take turns)
_CHECKED = 16  # tokens of all inputs together that are compared with float64, which is slow
_BOUNDS = {"float16": 1e-3, "bfloat16": 4e-3}
_REFERENCE = "float64, tokens of every input; repeats bitwise"


@dataclass(frozen=True)
class Work:
    """What a launch must do at the least.

    Attributes:
        nbytes: codes of the experts that routes name, x and y.
        flops: two for each weight and route.
        weights: of the experts that routes name.
    """

    nbytes: int
    flops: int
    weights: int


@dataclass(frozen=True, eq=False)
class Prepared:
    """Launches of a plan that are ready to be timed.

    Attributes:
        plan: what runs.
        case: without its mode.
        launches: one for each input.
        outputs: `[tokens, hidden]` that each writes.
        wanted: what the first launches wrote.
        check: of that.
        memory: planned and taken scratch.
    """

    plan: ExecutionPlan
    case: LayerCase
    launches: Sequence[Launch]
    outputs: Sequence[torch.Tensor]
    wanted: Sequence[torch.Tensor]
    check: Check
    memory: Memory

    def repeats(self) -> bool:
        """Whether outputs are what the first launches wrote."""
        return all(torch.equal(out, first) for out, first in zip(self.outputs, self.wanted, strict=True))


def plan_layer(
    preset: Preset,
    tokens: int,
    *,
    device: torch.device,
    arithmetic: str = "exact",
    io_dtype: str = "float16",
    scratch_bound: int | None = None,
    limits: DeviceLimits | None = None,
) -> ExecutionPlan:
    """The plan of a run of exactly so many tokens, for the device or, where it is not visible, for its limits."""
    source = preset.source()
    return plan_execution(
        plan_weights(source),
        activation=ActivationSpec(
            nonlinearity=preset.activation, io_dtype=io_dtype, output_dtype=io_dtype, arithmetic=arithmetic
        ),
        capacity=ExecutionCapacity(max_tokens=tokens, top_k=preset.top_k, scratch_bound=scratch_bound),
        device=device,
        limits=limits,
    )


class LayerBench:
    """Layers of noise of one preset on a device, with inputs for each token count.

    Args:
        preset: sizes and codes.
        device: where.
    """

    def __init__(self, preset: Preset, device: torch.device) -> None:
        self.preset = preset
        self.device = device
        source = preset.source()
        least = _LAYER_BYTES if device.type == "cuda" else 0
        count = max(1, -(-least // source.code_bytes()))
        self.layers = [random_experts(source, device=device, seed=seed) for seed in range(count)]
        self._inputs: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {}
        self._truths: dict[tuple[int, str], list[torch.Tensor]] = {}

    def inputs(self, tokens: int, io_dtype: str = "float16") -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """`(x [tokens, hidden], topk_ids int64, topk_weights float32)` of each launch, uniformly random routes."""
        key = tokens, io_dtype
        if key not in self._inputs:
            generator = torch.Generator(self.device).manual_seed(tokens)
            turns = next((turns for most, turns in _TURNS if tokens <= most), 2) if self.device.type == "cuda" else 2
            self._inputs[key] = [self._random_input(tokens, io_dtype, generator) for _ in range(turns)]
        return self._inputs[key]

    def _random_input(
        self, tokens: int, io_dtype: str, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = torch.randn(tokens, self.preset.experts, device=self.device, generator=generator)
        weights, ids = torch.softmax(logits, dim=-1).topk(self.preset.top_k)
        x = torch.randn(tokens, self.preset.hidden, device=self.device, generator=generator)
        return x.to(getattr(torch, io_dtype)), ids.contiguous(), weights.contiguous()

    def work(self, tokens: int) -> Work:
        """What a launch must do at the least, over the mean of the inputs."""
        preset = self.preset
        active = statistics.fmean(len(set(ids.reshape(-1).tolist())) for _, ids, _ in self.inputs(tokens))
        weights = round(active * preset.weights_per_expert)
        code_bytes = round(active * self.layers[0].source.code_bytes() / preset.experts)
        flops = 2 * tokens * preset.top_k * preset.weights_per_expert
        return Work(code_bytes + 4 * tokens * preset.hidden, flops, weights)

    def prepare(
        self, tokens: int, *, arithmetic: str = "exact", io_dtype: str = "float16", scratch_bound: int | None = None
    ) -> Prepared:
        """Bind, launch once into poisoned outputs, and compare them with the reference.

        Args:
            tokens: of a launch.
            arithmetic: what the plan may use.
            io_dtype: of x and y.
            scratch_bound: most bytes of scratch, or None.

        Raises:
            ValueError: if an output is outside its bound.
            MoeError: if the plan is refused.
        """
        plan = plan_layer(
            self.preset,
            tokens,
            device=self.device,
            arithmetic=arithmetic,
            io_dtype=io_dtype,
            scratch_bound=scratch_bound,
        )
        inputs = self.inputs(tokens, io_dtype)
        scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8, device=self.device)
        bindings = [bind(plan, experts, scratch) for experts in self.layers]
        outputs = [torch.full_like(x, torch.nan) for x, _, _ in inputs]
        launches = [
            partial(bindings[index % len(bindings)].run, *given, out=out)
            for index, (given, out) in enumerate(zip(inputs, outputs, strict=True))
        ]
        launches[0]()  # what a first launch does once is no part of its scratch
        extra = self._allocated_by(launches)
        check = Check(reference=_REFERENCE, error=self._error(tokens, io_dtype, outputs), bound=_BOUNDS[io_dtype])
        memory = Memory(
            planned_bytes=plan.required_nbytes(),
            final_bytes=scratch.numel() + extra,
            bound_bytes=scratch_bound or 0,
        )
        wanted = [out.clone() for out in outputs]
        return Prepared(plan, self._case(plan, tokens, io_dtype), launches, outputs, wanted, check, memory)

    def _case(self, plan: ExecutionPlan, tokens: int, io_dtype: str) -> LayerCase:
        preset, variant = self.preset, plan.variant_for(tokens)
        return LayerCase(
            geometry=preset.name,
            experts=preset.experts,
            hidden=preset.hidden,
            intermediate=preset.intermediate,
            top_k=preset.top_k,
            codebook=preset.codebook,
            k=preset.k,
            tokens=tokens,
            io_dtype=io_dtype,
            contender="trellis",
            arithmetic=variant.arithmetic,
            path=variant.path,
            mode="eager",
        )

    def _allocated_by(self, launches: Sequence[Launch]) -> int:
        """Launch, and say how many bytes of device memory that took; 0 on a CPU, which does not tell."""
        if self.device.type != "cuda":
            for launch in launches:
                launch()
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        for launch in launches:
            launch()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def _sampled(self, tokens: int, io_dtype: str) -> torch.Tensor:
        """Indices of the tokens of each input that are compared."""
        each = max(_CHECKED // len(self.inputs(tokens, io_dtype)), 1)
        return torch.linspace(0, tokens - 1, min(each, tokens), device=self.device).long()

    def _error(self, tokens: int, io_dtype: str, outputs: Sequence[torch.Tensor]) -> float:
        """The largest relative L2 of the sampled tokens of an output; NaN stays NaN."""
        key, rows = (tokens, io_dtype), self._sampled(tokens, io_dtype)
        if key not in self._truths:
            self._truths[key] = [
                float64_forward(self.layers[index % len(self.layers)], x[rows], ids[rows], weights[rows])
                for index, (x, ids, weights) in enumerate(self.inputs(tokens, io_dtype))
            ]
        errors = [
            (out[rows].double() - truth).norm() / truth.norm()
            for out, truth in zip(outputs, self._truths[key], strict=True)
        ]
        return float(torch.stack(errors).max())

    def measure(
        self,
        recorder: Recorder,
        tokens: int,
        *,
        arithmetic: str = "exact",
        io_dtype: str = "float16",
        scratch_bound: int | None = None,
        eager: bool = True,
    ) -> None:
        """Record a layer in a graph, and launched from Python.

        Args:
            recorder: takes the rows.
            tokens: of a launch.
            arithmetic: what the plan may use; where the plan uses another, nothing is recorded.
            io_dtype: of x and y.
            scratch_bound: most bytes of scratch, or None.
            eager: whether to time launches from Python too; on a CPU they are all that there is.

        Raises:
            ValueError: if an output is outside its bound, or changes from launch to launch.
            MoeError: if the plan is refused.
        """
        prepared = self.prepare(tokens, arithmetic=arithmetic, io_dtype=io_dtype, scratch_bound=scratch_bound)
        if prepared.case.arithmetic != arithmetic:
            why = f"the plan takes {prepared.case.arithmetic} products"
            recorder.skip(f"{self.preset.key}, {tokens} tokens, {arithmetic}", why)
            return
        taken: list[tuple[str, Samples]] = []
        if self.device.type == "cuda":
            least = 16 if tokens <= _TURNS[0][0] else 1
            taken.append(("graph", graph_samples(prepared.launches, count=recorder.samples, least=least)))
        if eager or not taken:
            taken.append(("eager", eager_samples(prepared.launches, device=self.device, count=recorder.samples)))
        if not prepared.repeats():
            raise ValueError("outputs differ from those of the first launch")
        work = self.work(tokens)
        for mode, samples in taken:
            recorder.add_row(
                prepared.case.model_copy(update={"mode": mode}),
                samples,
                nbytes=work.nbytes,
                flops=work.flops,
                weights=work.weights,
                check=prepared.check,
                memory=prepared.memory,
            )
