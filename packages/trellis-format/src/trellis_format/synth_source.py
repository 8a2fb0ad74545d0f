"""Owns a synthetic model as layers that a container can hold.  It must not know how tensors are made or written.

The codes of a linear are made when they are read, so that no more than one is held.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.convert_names import LayerNames
from trellis_format.convert_source import ConvertSource
from trellis_format.convert_target import TARGETS
from trellis_format.extent import BLOCK, TrellisExtent
from trellis_format.files.arrays import ArrayView
from trellis_format.model_config import parse_model_config
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights
from trellis_format.synth import SynthSpec, plan_synthetic, synth_config
from trellis_format.synth_names import get_naming
from trellis_format.writer import OutputDirectory, PlannedTensor

__all__ = ["PlannedArray", "SynthSource", "synth_container"]

_Half = npt.NDArray[np.float16]


class PlannedArray(ArrayView):
    """A planned tensor as an array, made anew at each read.

    Args:
        tensor: the plan; its dtype must be one of numpy's.
        dtype: of the array.
    """

    def __init__(self, tensor: PlannedTensor, dtype: str) -> None:
        self.shape = tensor.shape
        self.dtype = np.dtype(dtype)
        self._tensor = tensor

    def read(self) -> npt.NDArray[Any]:
        flat, done = np.zeros(self.nbytes, dtype=np.uint8), 0
        for chunk in self._tensor.chunks():
            if not isinstance(chunk, int):
                flat[done : done + chunk.nbytes] = chunk
            done += chunk if isinstance(chunk, int) else chunk.nbytes
        return flat.view(self.dtype).reshape(self.shape)

    def read_box(self, box: tuple[slice, ...], out: npt.NDArray[np.uint8]) -> None:
        lengths = self._check_out(box, out)
        if out.size:
            out.view(self.dtype).reshape(lengths)[...] = self.read()[box]


class SynthSource(ConvertSource):
    """The layers of a synthetic model.

    Args:
        spec: what to make.
    """

    container = "synth"

    def __init__(self, spec: SynthSpec) -> None:
        naming = get_naming(spec.naming)
        names = {
            layer: LayerNames(prefix=f"{naming.block_path(layer)}.experts", words=dict(naming.words))
            for layer in range(spec.layers)
        }
        super().__init__(Path(), names)
        self._spec = spec
        self._config = parse_model_config(synth_config(spec), file="config.json")
        prefixes = tuple(f"{it.prefix}." for it in names.values())
        planned = list(plan_synthetic(spec))
        self.outside = tuple(tensor for tensor in planned if not tensor.name.startswith(prefixes))
        self._tensors = {tensor.name: tensor for tensor in planned if tensor.name.startswith(prefixes)}

    def read_layer(self, layer: int, *, verify: bool = True) -> tuple[TrellisSource, TrellisWeights]:
        del verify  # what is made needs no digest
        source = self.describe(layer)
        projections, experts = source.geometry.projections, range(self._spec.experts)
        first = projections[:-1]
        weights = TrellisWeights(
            codes=tuple(
                tuple(PlannedArray(self._tensors[f"{self._module(layer, e, p)}.trellis"], "<i2") for p in projections)
                for e in experts
            ),
            rate=source.rates.rate_bytes(),
            input_scales=self._stack(layer, [[(p, "suh") for p in first]] * len(experts)),
            intermediate_scales=self._stack(
                layer, [[*((p, "svh") for p in first), (Projection.DOWN, "suh")]] * len(experts)
            ),
            output_scales=self._stack(layer, [[(Projection.DOWN, "svh")]] * len(experts))[:, 0],
            biases={p: self._stack(layer, [[(p, "bias")]] * len(experts))[:, 0] for p in source.biased},
        )
        return source, weights

    def files(self) -> list[Path]:
        return []

    def identity(self) -> list[list[Any]]:
        return [[repr(self._spec)]]

    def describe(self, layer: int) -> TrellisSource:
        """One layer without its arrays."""
        spec, naming = self._spec, get_naming(self._spec.naming)
        hidden, intermediate = (-(-size // BLOCK) * BLOCK for size in (spec.hidden, spec.intermediate))
        projections = tuple(naming.words)
        rates = [
            [Rate.from_width(self._tensors[f"{self._module(layer, e, p)}.trellis"].shape[2]) for p in projections]
            for e in range(spec.experts)
        ]
        return TrellisSource(
            codebook=spec.codebook,
            geometry=ExpertGeometry(
                num_experts=spec.experts,
                hidden_size=spec.hidden,
                intermediate_size=spec.intermediate,
                padded_hidden_size=hidden,
                padded_intermediate_size=intermediate,
                projections=projections,
            ),
            rates=RateTable.of(rates),
            layout=CodeLayout.EXL3_LINEAR,
            extent=TrellisExtent.whole(intermediate),
            biased=projections if naming.biased else (),
            activation=self._config.activation(),
        )

    def _module(self, layer: int, expert: int, projection: Projection) -> str:
        return self.names[layer].module(expert, projection)

    def _stack(self, layer: int, rows: list[list[tuple[Projection, str]]]) -> _Half:
        """Vectors of every expert, `[experts, vectors, channels]`."""
        return np.stack(
            [
                np.stack([self._vector(f"{self._module(layer, e, projection)}.{word}") for projection, word in row])
                for e, row in enumerate(rows)
            ]
        )

    def _vector(self, name: str) -> _Half:
        return PlannedArray(self._tensors[name], "<f2").read()


def synth_container(
    path: str | os.PathLike[str], spec: SynthSpec, container: str, *, on_bytes: Callable[[int], None] | None = None
) -> int:
    """Write a random checkpoint in a container; the directory appears when it is complete.

    Args:
        path: the directory; it must not exist, or be empty.
        spec: what to make; tensors outside of experts go to files of their own.
        container: its name, `exl3-v1` or `native`.
        on_bytes: told of each piece of tensor data that was written, in bytes.

    Returns:
        Bytes of tensor data.

    Raises:
        FormatUnsupportedError: if the container cannot hold such a model; has the reason.
        FormatValueError: if the directory exists or cannot be written.
    """
    source, written = SynthSource(spec), 0

    def count(nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if on_bytes is not None:
            on_bytes(nbytes)

    sources = {layer: source.describe(layer) for layer in source.layers}
    TARGETS[container].check(sources)
    with OutputDirectory(path, fingerprint=repr((spec, container))) as directory:
        TARGETS[container].write(
            directory, sources, source.read_layer, source.outside, source.names, shards=spec.shards, on_bytes=count
        )
        stated = TARGETS[container].quantization_config(sources)
        config = synth_config(spec) | ({} if stated is None else {"quantization_config": stated})
        directory.write_json(CONFIG_NAME, config)
    return written
