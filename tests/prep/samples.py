"""Owns layers of random codes, in memory and in files, and the slicing of shares that tests compare with.

Any bits are a legal tile, so codes are uniform noise; the rates that mix are those that need most different sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import save_file

from trellis_format.activations import Activation
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.codebooks import get_codebook
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.extent import BLOCK, SLOT, TrellisExtent
from trellis_format.files.arrays import ArrayView, MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_prep import PreparedExperts, pinned, slots

MIXED = ("1", "2.5", "4", "8")
"""K of the linears of a mixed layer, taken in turn over experts and projections."""

Layer = tuple[TrellisSource, TrellisWeights]


def random_layer(
    *,
    experts: int = 3,
    hidden: int = 256,
    intermediate: int = 384,
    codebook: str = "mul1",
    rates: Sequence[str] = MIXED,
    gated: bool = True,
    biased: bool = False,
    shared: bool = False,
    joint: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer in memory; `rates` are taken in turn, and `shared` lets experts share input and output vectors."""
    rng = np.random.default_rng(seed)
    projections = tuple(Projection) if gated else (Projection.UP, Projection.DOWN)
    geometry = ExpertGeometry(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        padded_hidden_size=hidden,
        padded_intermediate_size=intermediate,
        projections=projections,
    )
    count = len(projections)
    table = [[Rate.of(rates[(expert * count + p) % len(rates)]) for p in range(count)] for expert in range(experts)]
    inputs, shared_axis = (1 if joint or not gated else 2), (() if shared else (experts,))
    source = TrellisSource(
        codebook=codebook,
        geometry=geometry,
        rates=RateTable.of(table),
        layout=CodeLayout.EXL3_LINEAR,
        extent=TrellisExtent.whole(intermediate),
        shared_input_scales=shared,
        joint_input_scales=joint or not gated,
        shared_output_scales=shared,
        biased=projections if biased else (),
        activation=Activation("silu" if gated else "relu2"),
    )
    weights = TrellisWeights(
        codes=tuple(
            tuple(MemoryArray(random_tiles(rng, geometry.matrix(p), row[i])) for i, p in enumerate(projections))
            for row in table
        ),
        rate=source.rates.rate_bytes(),
        input_scales=random_halves(rng, (*shared_axis, inputs, hidden)),
        intermediate_scales=random_halves(rng, (experts, count, intermediate)),
        output_scales=random_halves(rng, (*shared_axis, hidden)),
        biases={p: random_halves(rng, (experts, geometry.matrix(p)[1])) for p in source.biased},
    )
    return source, weights


def random_tiles(rng: np.random.Generator, matrix: tuple[int, int], rate: Rate) -> npt.NDArray[np.int16]:
    """`[k_tiles, n_tiles, 16*K] int16` of noise for a (k, n) matrix."""
    return rng.integers(-(2**15), 2**15, (matrix[0] // 16, matrix[1] // 16, rate.tile_words16), dtype=np.int16)


def random_halves(rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float16]:
    """Finite signed float16 of about unit size."""
    return (rng.standard_normal(shape) * 0.5 + 0.25).astype(np.float16)


def extent_of(intermediate: int, first_block: int, blocks: int) -> TrellisExtent:
    """The extent of whole Hadamard blocks [first_block, first_block + blocks)."""
    slots = BLOCK // SLOT
    return TrellisExtent(
        global_intermediate_size=intermediate, first_slot=first_block * slots, slot_count=blocks * slots
    )


def expected_tiles(layer: Layer, extent: TrellisExtent, expert: int, projection: int) -> npt.NDArray[np.int16]:
    """A linear's share by plain slicing: down is cut along k, the others along n."""
    source, weights = layer
    first, end = (channel // 16 for channel in (extent.first_channel, extent.end_channel))
    tiles: npt.NDArray[np.int16] = weights.code_view(expert, projection).read()
    down = source.geometry.projections[projection] is Projection.DOWN
    return tiles[first:end] if down else tiles[:, first:end]


def linears(source: TrellisSource) -> list[tuple[int, int]]:
    """(expert, projection) of every linear."""
    geometry = source.geometry
    return [(e, p) for e in range(geometry.num_experts) for p in range(len(geometry.projections))]


def write_checkpoint(path: Path, layer: Layer) -> Path:
    """Write a layer as the EXL3 experts of layer 0 of a checkpoint."""
    source, weights = layer
    tensors = {}
    marker = get_codebook(source.codebook)
    for expert, index in linears(source):
        projection = source.geometry.projections[index]
        name = f"model.layers.0.mlp.experts.{expert}.{projection}_proj"
        inputs = weights.input_scales if source.shared_input_scales else weights.input_scales[expert]
        outputs = weights.output_scales if source.shared_output_scales else weights.output_scales[expert]
        middle = weights.intermediate_scales[expert, index]
        down = projection is Projection.DOWN
        tensors[f"{name}.trellis"] = weights.code_view(expert, index).read()
        tensors[f"{name}.suh"] = middle if down else np.ascontiguousarray(inputs[index % len(inputs)])
        tensors[f"{name}.svh"] = np.ascontiguousarray(outputs) if down else middle
        if marker.marker is not None:
            tensors[f"{name}.{marker.marker}"] = np.array(marker.multiplier, dtype=np.uint32).view(np.int32)
        if projection in weights.biases:
            tensors[f"{name}.bias"] = weights.biases[projection][expert]
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "model.safetensors")
    return path


def open_layer(path: Path, index: int = 0) -> tuple[Checkpoint, TrellisSource, TrellisWeights]:
    """A checkpoint and one of its layers, codes left in the file."""
    checkpoint = open_checkpoint(path)
    return checkpoint, *trellis_from_exl3(find_layer(checkpoint, index))


def weights_of(prepared: PreparedExperts, patterns: npt.NDArray[np.uint8] | None = None) -> Layer:
    """What a prepared share holds, as a layer that covers its extent: for the float64 reference.

    Sign patterns are the layer's own: the reference draws signs of the whole axis from them.
    """
    source = dataclasses.replace(
        prepared.source,
        layout=CodeLayout.EXL3_LINEAR,
        extent=prepared.extent,
        biased=tuple(projection for projection in Projection if projection in prepared.biases),
    )
    inputs, outputs = prepared.input_scales.cpu().numpy(), prepared.output_scales.cpu().numpy()
    projections = range(len(source.geometry.projections))
    return source, TrellisWeights(
        codes=tuple(
            tuple(MemoryArray(prepared.tiles(expert, index)[0].cpu().numpy()) for index in projections)
            for expert in range(source.geometry.num_experts)
        ),
        rate=source.rates.rate_bytes(),
        input_scales=inputs[0] if source.shared_input_scales else inputs,
        intermediate_scales=prepared.intermediate_scales.cpu().numpy(),
        output_scales=outputs[0] if source.shared_output_scales else outputs,
        biases={projection: bias.cpu().numpy() for projection, bias in prepared.biases.items()},
        expert_sign_patterns=patterns,
    )


def random_tokens(source: TrellisSource, tokens: int = 5, top_k: int = 2, seed: int = 1) -> tuple[Any, Any, Any]:
    """X `[tokens, hidden]`, ids and weights `[tokens, top_k]`; one id is no expert."""
    rng = np.random.default_rng(seed)
    experts = source.geometry.num_experts
    ids = rng.integers(0, experts, (tokens, top_k))
    ids[0, -1] = -1
    return rng.standard_normal((tokens, source.geometry.hidden_size)), ids, rng.random((tokens, top_k))


class HookedArray(ArrayView):
    """A view that calls a hook before each read; the hook may raise, or change the file below."""

    def __init__(self, inner: ArrayView, hook: Callable[[], None]) -> None:
        self.inner, self.hook = inner, hook
        self.shape, self.dtype = inner.shape, inner.dtype

    def read(self) -> npt.NDArray[Any]:
        self.hook()
        return self.inner.read()

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        self.hook()
        self.inner.read_box(box, out)


def hooked(layer: Layer, expert: int, projection: int, hook: Callable[[], None]) -> Layer:
    """A layer whose read of one linear calls a hook first."""
    source, weights = layer
    rows = [list(row) for row in weights.codes]
    rows[expert][projection] = HookedArray(rows[expert][projection], hook)
    return source, dataclasses.replace(weights, codes=tuple(tuple(row) for row in rows))


class FakeCudart:
    """CUDA's registration of host memory, counted."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.held: dict[int, int] = {}
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # CUDA's name
        assert address % 4096 == 0
        assert address not in self.held
        if not self.status:
            self.held[address] = nbytes
            self.registered.append(nbytes)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # CUDA's name
        del self.held[address]
        return 0


def lock_on_cpu(monkeypatch: pytest.MonkeyPatch, status: int = 0) -> FakeCudart:
    """Let preparation on a CPU register its slots as for a GPU, with a fake runtime."""
    fake = FakeCudart(status)
    monkeypatch.setattr(pinned, "_cudart", lambda: fake)
    monkeypatch.setattr(pinned, "_clear_error", lambda device: None)
    ring = slots.HostBuffer
    monkeypatch.setattr(slots, "HostBuffer", lambda nbytes, device: ring(nbytes, device=torch.device("cuda", 0)))
    return fake
