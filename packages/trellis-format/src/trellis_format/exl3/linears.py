"""Owns the way from a described layer back to EXL3 linears: the inverse of the adapter.  It must not decode or cast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.rates import TILE
from trellis_format.slots import read_linear
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.writer import CHUNK_BYTES, Chunks, PlannedTensor, of_array

__all__ = ["LinearVectors", "exl3_refusal", "plan_linears"]

_Half = npt.NDArray[np.float16]


def exl3_refusal(source: TrellisSource) -> str | None:
    """Why EXL3 linears cannot hold a layer without loss, or None where they can."""
    if source.codebook not in EXL3_CODEBOOKS:
        return f"codebook {source.codebook} is not one of {', '.join(EXL3_CODEBOOKS)}"
    if source.expert_transform is not None:
        return "experts were quantised under an intermediate Hadamard, for which EXL3 has no field"
    if not source.extent.is_whole:
        return f"only {source.extent.width} of {source.extent.global_intermediate_size} channels are at hand"
    return None


def plan_linears(
    source: TrellisSource, read: Callable[[], TrellisWeights], module: Callable[[int, Projection], str]
) -> Iterator[PlannedTensor]:
    """Plan the tensors of every expert's linears; nothing is read before it is written.

    Args:
        source: a layer that `exl3_refusal` does not refuse.
        read: gives its arrays, the same ones again and again.
        module: the name of a linear, from the expert's index and the projection.

    Yields:
        For each linear its trellis, suh, svh, the codebook's marker and a bias where it has one.
    """
    marker = EXL3_CODEBOOKS[source.codebook]
    geometry = source.geometry
    for expert in range(geometry.num_experts):
        for index, projection in enumerate(geometry.projections):
            name, (k, n) = module(expert, projection), geometry.matrix(projection)
            where = LinearVectors(source, read, expert, projection)
            yield _codes(source, read, expert, index, name)
            yield _planned(f"{name}.suh", k, where.suh)
            yield _planned(f"{name}.svh", n, where.svh)
            if marker.multiplier is not None:
                yield of_array(f"{name}.{marker.marker}", np.array(marker.multiplier, np.uint32).view(np.int32))
            if projection in source.biased:
                yield _planned(f"{name}.bias", n, where.bias)


def _codes(
    source: TrellisSource, read: Callable[[], TrellisWeights], expert: int, index: int, name: str
) -> PlannedTensor:
    k, n = source.geometry.matrix(source.geometry.projections[index])
    shape = (k // TILE, n // TILE, source.rates.rate(expert, index).tile_words16)

    def chunks() -> Chunks:
        tiles = np.ascontiguousarray(read_linear(source, read(), expert, index), dtype="<i2")
        flat = tiles.reshape(-1).view(np.uint8)
        for begin in range(0, flat.size, CHUNK_BYTES):
            yield flat[begin : begin + CHUNK_BYTES]

    return PlannedTensor(f"{name}.trellis", "I16", shape, chunks)


def _planned(name: str, channels: int, read: Callable[[], _Half]) -> PlannedTensor:
    def chunks() -> Chunks:
        yield np.ascontiguousarray(read(), dtype="<f2").view(np.uint8)

    return PlannedTensor(name, "F16", (channels,), chunks)


@dataclass(frozen=True)
class LinearVectors:
    """Where a layer keeps the vectors of one linear.

    Attributes:
        source: the layer.
        read: gives its arrays.
        expert: index.
        projection: which of the expert's linears.
    """

    source: TrellisSource
    read: Callable[[], TrellisWeights]
    expert: int
    projection: Projection

    def suh(self) -> _Half:
        """`[k] float16`: the input scale."""
        weights, source = self.read(), self.source
        if self.projection is Projection.DOWN:
            return self._between(weights)
        rows = weights.input_scales if source.shared_input_scales else weights.input_scales[self.expert]
        vector: _Half = rows[0 if len(rows) == 1 else source.geometry.projections.index(self.projection)]
        return vector

    def svh(self) -> _Half:
        """`[n] float16`: the output scale."""
        weights = self.read()
        if self.projection is not Projection.DOWN:
            return self._between(weights)
        outputs = weights.output_scales
        vector: _Half = outputs if self.source.shared_output_scales else outputs[self.expert]
        return vector

    def bias(self) -> _Half:
        """`[n] float16`: the bias; only of a projection that has one."""
        vector: _Half = self.read().biases[self.projection][self.expert]
        return vector

    def _between(self, weights: TrellisWeights) -> _Half:
        index = self.source.geometry.projections.index(self.projection)
        scales: _Half = weights.intermediate_scales[self.expert, index]
        return scales
