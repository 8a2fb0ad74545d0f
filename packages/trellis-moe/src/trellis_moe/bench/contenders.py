"""Owns what layers are compared with: grouped GEMMs of bf16 weights, and the torch backend on a CPU.

It must not know how trellis layers are launched beyond `LayerBench`.

Contenders of one comparison run in one process, in turns whose order reverses.  The grouped GEMMs are given rows in
expert order and leave out gathering, rotations and the sum of routes, so what they are spared counts for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.rates import Rate
from trellis_kernels import decode
from trellis_kernels.bench.timing import Launch, alternating_samples, eager_samples
from trellis_kernels.cute.keys import DecodeKey, KernelKey
from trellis_moe.bench.layers import LayerBench, Work
from trellis_moe.bench.presets import Preset
from trellis_moe.bench.record import Recorder
from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.receipts.figures import UNQUANTISED
from trellis_moe.receipts.schema import Check, LayerCase
from trellis_prep import PreparedExperts

__all__ = ["DECODED", "GroupedLayer", "compare", "compare_cpu", "contender_keys"]

DECODED = "decode + bf16 grouped GEMM"
"""Name of the contender that decodes every expert in each launch."""
TORCH_CPU = "torch on the CPU"
"""Name of the contender that runs the torch backend on the host."""

_CHECKED = 16  # rows that are compared with float64
_BOUND = 1.2e-2  # of bf16 products, activations and outputs: three roundings of 2^-9 each
_REFERENCE = "float64 of the bf16 weights, sampled rows"


def contender_keys(preset: Preset, arch: str) -> list[KernelKey]:
    """The kernels that a comparison launches beside the layer's own."""
    return [DecodeKey(arch, preset.codebook, Rate.of(preset.k).half_bits, "bfloat16")]


class GroupedLayer:
    """The products of a layer by `torch._grouped_mm`, with every expert as a bf16 matrix.

    Args:
        experts: the layer; silu of a gate, and all linears of one rate.

    Raises:
        MoeUnsupportedError: if it has another activation.
    """

    def __init__(self, experts: PreparedExperts) -> None:
        source = experts.source
        if source.activation is None or source.activation != Activation("silu"):
            raise MoeUnsupportedError(f"grouped GEMMs are compared for silu alone, the layer has {source.activation}")
        (self._rate,) = source.rates.distinct()
        self._codebook = get_codebook(source.codebook).name
        geometry, device = source.geometry, experts.device
        shape = (geometry.num_experts, geometry.padded_hidden_size, source.extent.width)
        self._codes = [_codes(experts, projection) for projection in range(3)]
        self.gate = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.up = torch.empty_like(self.gate)
        self.down = torch.empty(shape[0], shape[2], shape[1], dtype=torch.bfloat16, device=device)
        self.decode()
        self._joined = torch.cat((self.gate, self.up), dim=2)

    def decode(self) -> None:
        """Decode every expert."""
        for codes, out in zip(self._codes, (self.gate, self.up, self.down), strict=True):
            decode(codes, codebook=self._codebook, rate=self._rate, out=out)

    def multiply(self, rows: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Gate and up as one product, silu, down.

        Args:
            rows: `[routes, hidden] bfloat16` in expert order.
            ends: `[experts] int32`, the row after each expert's last.
            out: `[routes, hidden] bfloat16`.
        """
        joined = torch._grouped_mm(rows, self._joined, offs=ends)
        gate, up = joined.chunk(2, dim=1)
        return out.copy_(torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=ends))

    def decode_and_multiply(self, rows: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Decode every expert, then the products of what was decoded; gate and up are two."""
        self.decode()
        gate = torch._grouped_mm(rows, self.gate, offs=ends)
        up = torch._grouped_mm(rows, self.up, offs=ends)
        return out.copy_(torch._grouped_mm(torch.nn.functional.silu(gate) * up, self.down, offs=ends))

    def error(self, rows: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> float:
        """Relative L2 of sampled rows of an output."""
        sampled = torch.linspace(0, rows.shape[0] - 1, min(_CHECKED, rows.shape[0])).long().tolist()
        wanted = torch.stack([self._row(rows[row], int((ends <= row).sum())) for row in sampled])
        return float((out[sampled].double() - wanted).norm() / wanted.norm())

    def _row(self, row: torch.Tensor, expert: int) -> torch.Tensor:
        x = row.double()
        gate, up = x @ self.gate[expert].double(), x @ self.up[expert].double()
        return (torch.nn.functional.silu(gate) * up) @ self.down[expert].double()


def _codes(experts: PreparedExperts, projection: int) -> torch.Tensor:
    """`[experts, k_tiles, n_tiles, 16*K] int16`: a projection's codes, which lie one expert after the other."""
    tiles = [experts.tiles(expert, projection)[0] for expert in range(experts.source.geometry.num_experts)]
    first, last = tiles[0], tiles[-1]
    words = first.numel() // 2
    begin = (first.data_ptr() - experts.codes.data_ptr()) // experts.codes.element_size()
    assert last.data_ptr() - first.data_ptr() == (len(tiles) - 1) * first.numel() * first.element_size()
    return experts.codes[begin : begin + len(tiles) * words].view(torch.int16).view(len(tiles), *first.shape)


def compare(recorder: Recorder, bench: LayerBench, tokens: int, *, decoded: GroupedLayer) -> None:
    """Record a trellis layer, bf16 grouped GEMMs, and decoding before them, measured in turns.

    Args:
        recorder: takes the rows.
        bench: layers and inputs.
        tokens: of a launch.
        decoded: the bench's first layer.

    Raises:
        ValueError: if an output is outside its bound, or changes from launch to launch.
        MoeError: if the plan is refused.
    """
    prepared = bench.prepare(tokens)
    groups = [_grouped_input(bench, ids, seed) for seed, (_, ids, _) in enumerate(bench.inputs(tokens))]
    outputs = {name: [torch.full_like(rows, torch.nan) for rows, _ in groups] for name in (UNQUANTISED, DECODED)}
    contenders: dict[str, Sequence[Launch]] = {"trellis": prepared.launches}
    for name, multiply in ((UNQUANTISED, decoded.multiply), (DECODED, decoded.decode_and_multiply)):
        contenders[name] = [
            partial(multiply, rows, ends, out)
            for (rows, ends), out in zip(groups, outputs[name], strict=True)
        ]  # fmt: skip
    samples = alternating_samples(contenders, device=bench.device, count=recorder.samples)
    if not prepared.repeats():
        raise ValueError("outputs differ from those of the first launch")
    work = bench.work(tokens)
    update = {"mode": recorder.mode}
    recorder.add_row(
        prepared.case.model_copy(update=update),
        samples["trellis"],
        nbytes=work.nbytes,
        flops=work.flops,
        weights=work.weights,
        check=prepared.check,
        memory=prepared.memory,
    )
    for name, outs in outputs.items():
        error = max(decoded.error(*group, out) for group, out in zip(groups, outs, strict=True))
        weight_bytes = _weight_bytes(bench, work, decodes=name == DECODED)
        recorder.add_row(
            _other_case(prepared.case, name, "torch._grouped_mm", recorder),
            samples[name],
            nbytes=weight_bytes + 4 * tokens * bench.preset.top_k * bench.preset.hidden,
            flops=work.flops,
            weights=bench.preset.experts * bench.preset.weights_per_expert if name == DECODED else 0,
            check=Check(reference=_REFERENCE, error=error, bound=_BOUND),
        )


def _weight_bytes(bench: LayerBench, work: Work, *, decodes: bool) -> int:
    """Bytes of weights that a grouped GEMM must read, and before that those that decoding reads and writes."""
    whole = bench.preset.experts * bench.preset.weights_per_expert
    return 2 * work.weights + (2 * whole + bench.layers[0].source.code_bytes() if decodes else 0)


def _grouped_input(bench: LayerBench, ids: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in expert order, as many for each expert as routes name it, scaled so that results are of order one."""
    preset = bench.preset
    counts = torch.bincount(ids.reshape(-1), minlength=preset.experts)
    generator = torch.Generator(bench.device).manual_seed(seed)
    rows = torch.randn(ids.numel(), preset.hidden, device=bench.device, generator=generator)
    return (rows * 2 * preset.hidden**-0.5).bfloat16(), counts.cumsum(0).to(torch.int32)


def _other_case(ours: LayerCase, contender: str, path: str, recorder: Recorder) -> LayerCase:
    update = {"contender": contender, "arithmetic": "none", "path": path, "io_dtype": "bfloat16", "mode": recorder.mode}
    return ours.model_copy(update=update)


def compare_cpu(recorder: Recorder, preset: Preset, tokens: int) -> None:
    """Record the torch backend on the host, which is made to be checked against and not to be fast.

    Args:
        recorder: takes the row.
        preset: sizes and codes.
        tokens: of a launch.

    Raises:
        ValueError: if an output is outside its bound, or changes from launch to launch.
    """
    host = torch.device("cpu")
    bench = LayerBench(preset, host)
    prepared = bench.prepare(tokens)
    samples = eager_samples(prepared.launches[:1], device=host, count=5, warm_ups=1)
    if not prepared.repeats():
        raise ValueError("outputs differ from those of the first launch")
    work = bench.work(tokens)
    recorder.add_row(
        prepared.case.model_copy(update={"contender": TORCH_CPU}),
        samples,
        nbytes=work.nbytes,
        flops=work.flops,
        weights=work.weights,
        check=prepared.check,
        memory=prepared.memory,
    )
