"""Owns layers of random codes, in memory and in files, and the slicing of shares that tests compare with.

Any bits are a legal tile, so codes are uniform noise; the rates that mix are those that need most different sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from trellis_format.activations import Activation
from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.codebooks import get_codebook
from trellis_format.exl3.adapter import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.extent import BLOCK, SLOT, TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights

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
