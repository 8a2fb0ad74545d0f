"""Owns the making of random checkpoints of any geometry.  It must not know how they are read.

Random bits are legal tiles, so a checkpoint needs no quantiser: codes are random words, scales are random signs times
magnitudes that keep activations near 1.  Each tensor draws from a generator seeded by the seed and the tensor's name,
so its bytes depend on nothing else: neither on the number of shards nor on what other tensors there are.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trellis_format.checkpoint import MAX_SHARDS
from trellis_format.codebooks import EXL3_CODEBOOKS, get_codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.exl3.writer import quantization_object, write_exl3
from trellis_format.extent import BLOCK
from trellis_format.rates import TILE, Rate
from trellis_format.source import Projection
from trellis_format.synth_names import Naming, get_naming
from trellis_format.writer import CHUNK_BYTES, Chunks, OutputDirectory, PlannedTensor, of_array

__all__ = [
    "HEAD_RATE",
    "MAX_CHANNELS",
    "MAX_LINEARS",
    "MAX_ROUTER_WEIGHTS",
    "SynthSpec",
    "plan_synthetic",
    "synth_checkpoint",
    "synth_config",
]

HEAD_RATE = Rate.of(6)
"""K of the projection to the vocabulary."""
_VOCABULARY = 512  # tokens; enough to have a head and an embedding
MAX_CHANNELS = 1 << 17
"""Widest side of a linear; wider ones are stored in slices."""
MAX_LINEARS = 250_000
"""Most linears of one checkpoint; each is a few objects in memory before anything is written."""
MAX_ROUTER_WEIGHTS = 1 << 26
"""Most weights of one router, experts times hidden channels: they are made in memory, in float64."""
_DENSE_LINEARS = 7  # of a layer: attention and shared experts
_SIZES = ("hidden", "intermediate", "experts", "layers", "top_k", "shards")


@dataclass(frozen=True, kw_only=True)
class SynthSpec:
    """What to make; sizes are channels.

    Args:
        hidden: hidden size; stored rounded up to a multiple of 128.
        intermediate: width of an expert; stored rounded up to a multiple of 128.
        experts: routed experts of a layer.
        layers: layers.
        top_k: routes of a token.
        rates: one K, or several from which each draw takes one.
        mix: what takes a draw of its own where there are several: a layer, an expert, or a projection of an expert.
        codebook: its name.
        naming: whose names to use; see `trellis_format.synth_names.NAMINGS`.
        shards: most shards to write.
        seed: of everything that is random.
        dense: whether to make attention, shared experts, norms, embedding and head too.
        sparse: whether codes are holes, zeros that take no room on disk, instead of random words.

    Raises:
        FormatTypeError: if a size or the seed is not an int.
        FormatValueError: if a size is not positive or beyond its bound, the seed negative, `top_k` above `experts`, a
            rate not legal for the codebook, or a name not known.
    """

    hidden: int
    intermediate: int
    experts: int
    layers: int
    top_k: int = 2
    rates: tuple[Rate, ...] = field(default_factory=lambda: (Rate.of(3),))
    mix: Literal["layer", "expert", "projection"] = "projection"
    codebook: str = "mul1"
    naming: str = "qwen3"
    shards: int = 1
    seed: int = 0
    dense: bool = False
    sparse: bool = False

    def __post_init__(self) -> None:
        for name in (*_SIZES, "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise FormatTypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < (0 if name == "seed" else 1):
                raise FormatValueError(f"{name} {value} is below {0 if name == 'seed' else 1}")
        self._check_bounds()
        if self.top_k > self.experts:
            raise FormatValueError(f"top_k {self.top_k} exceeds the {self.experts} experts")
        if self.mix not in ("layer", "expert", "projection"):
            raise FormatValueError(f"unknown mix {self.mix!r}; known: layer, expert, projection")
        if not self.rates:
            raise FormatValueError("at least one rate is needed")
        for rate in self.rates:
            get_codebook(self.codebook).check_rate(rate)
        if self.dense and self.codebook not in EXL3_CODEBOOKS:
            raise FormatValueError(
                f"linears outside of experts are EXL3, which has no codebook {self.codebook}; known: "
                f"{', '.join(EXL3_CODEBOOKS)}"
            )
        get_naming(self.naming)

    def _check_bounds(self) -> None:
        linears = self.layers * (3 * self.experts + (_DENSE_LINEARS if self.dense else 0))
        for text, size, bound in (
            ("hidden channels", self.hidden, MAX_CHANNELS),
            ("intermediate channels", self.intermediate, MAX_CHANNELS),
            (f"linears in {self.layers} layers of {self.experts} experts", linears, MAX_LINEARS),
            ("router weights, experts times hidden channels,", self.experts * self.hidden, MAX_ROUTER_WEIGHTS),
            ("shards", self.shards, MAX_SHARDS),
        ):
            if size > bound:
                raise FormatValueError(f"{size} {text} exceed the bound of {bound}")


def synth_checkpoint(
    path: str | os.PathLike[str], spec: SynthSpec, *, on_bytes: Callable[[int], None] | None = None
) -> int:
    """Write a random EXL3 checkpoint; the directory appears when it is complete.

    Args:
        path: the directory; it must not exist, or be empty.
        spec: what to make.
        on_bytes: told of each piece of tensor data that was written, in bytes.

    Returns:
        Bytes of its tensors.

    Raises:
        FormatValueError: if EXL3 has no such codebook, or the directory exists or cannot be written.
    """
    if spec.codebook not in EXL3_CODEBOOKS:
        raise FormatValueError(f"unknown codebook {spec.codebook!r} of EXL3; known: {', '.join(EXL3_CODEBOOKS)}")
    tensors = list(plan_synthetic(spec))
    head_bits = HEAD_RATE.bits if spec.dense else None
    stated = quantization_object(tensors, codebook=spec.codebook, head_bits=head_bits)
    with OutputDirectory(path, fingerprint=repr(spec)) as directory:
        write_exl3(
            directory,
            tensors,
            config=synth_config(spec) | {"quantization_config": stated},
            quantization=stated,
            shards=spec.shards,
            on_bytes=on_bytes,
        )
    return sum(tensor.nbytes for tensor in tensors)


def synth_config(spec: SynthSpec) -> dict[str, Any]:
    """The model's configuration, without what it says about quantisation."""
    config = get_naming(spec.naming).config(
        hidden=spec.hidden, intermediate=spec.intermediate, experts=spec.experts, layers=spec.layers, top_k=spec.top_k
    )
    return config | ({"vocab_size": _VOCABULARY} if spec.dense else {})


def plan_synthetic(spec: SynthSpec) -> Iterator[PlannedTensor]:
    """Every tensor of a random checkpoint, in the order of the model."""
    naming, maker = get_naming(spec.naming), _Maker(spec)
    root = naming.layers.rpartition(".")[0]
    if spec.dense:
        yield maker.normal(f"{root}.embed_tokens.weight", (_VOCABULARY, spec.hidden), 1.0)
    for layer in range(spec.layers):
        yield from _dense_layer(spec, naming, maker, layer)
        block = naming.block_path(layer)
        yield maker.normal(f"{block}.{naming.router}.weight", (spec.experts, spec.hidden), spec.hidden**-0.5)
        if naming.biased:
            yield maker.normal(f"{block}.{naming.router}.bias", (spec.experts,), 0.1)
        for expert in range(spec.experts):
            for projection in naming.words:
                rate = _rate(spec, layer, expert, projection)
                module = naming.expert_path(layer, expert, projection)
                yield from maker.linear(module, *_sides(spec, projection), rate, biased=naming.biased)
    if spec.dense:
        yield maker.ones(f"{root}.norm.weight", spec.hidden)
        yield from maker.linear("lm_head", spec.hidden, _VOCABULARY, HEAD_RATE, biased=False)


def _dense_layer(spec: SynthSpec, naming: Naming, maker: _Maker, layer: int) -> Iterator[PlannedTensor]:
    if not spec.dense:
        return
    path, rate = f"{naming.layers}.{layer}", _rate(spec, layer, 0, Projection.DOWN)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield maker.ones(f"{path}.{norm}.weight", spec.hidden)
    for word in ("q_proj", "k_proj", "v_proj", "o_proj"):
        yield from maker.linear(f"{path}.self_attn.{word}", spec.hidden, spec.hidden, rate, biased=False)
    if naming.shared is not None:
        for projection, word in naming.words.items():
            module = f"{naming.block_path(layer)}.{naming.shared}.{word}"
            yield from maker.linear(module, *_sides(spec, projection), rate, biased=False)


def _sides(spec: SynthSpec, projection: Projection) -> tuple[int, int]:
    sides = (spec.hidden, spec.intermediate)
    return sides[::-1] if projection is Projection.DOWN else sides


def _rate(spec: SynthSpec, layer: int, expert: int, projection: Projection) -> Rate:
    parts = {"layer": (layer,), "expert": (layer, expert), "projection": (layer, expert, projection.value)}
    drawn = _generator(spec.seed, f"rate {parts[spec.mix]}").random_raw()
    return spec.rates[int(drawn) % len(spec.rates)]


def _generator(seed: int, name: str) -> Any:
    """A generator whose raw words numpy promises to keep, unlike what its distributions make of them."""
    words = np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4")
    return np.random.SFC64([seed, *map(int, words)])


class _Maker:
    """Makes the tensors of a specification."""

    def __init__(self, spec: SynthSpec) -> None:
        self._spec = spec
        self._codebook = get_codebook(spec.codebook)
        rates = {*spec.rates, *([HEAD_RATE] if spec.dense else [])}
        self._spreads = {rate: float(self._codebook.table_for(rate).astype(np.float64).std()) for rate in rates}

    def linear(self, module: str, k: int, n: int, rate: Rate, *, biased: bool) -> Iterator[PlannedTensor]:
        """The tensors of a linear of `k x n` true channels."""
        stored_k, stored_n = (-(-side // BLOCK) * BLOCK for side in (k, n))
        shape = (stored_k // TILE, stored_n // TILE, rate.tile_words16)
        yield PlannedTensor(f"{module}.trellis", "I16", shape, self._codes(f"{module}.trellis", math.prod(shape) * 2))
        yield self._vector(f"{module}.suh", stored_k, stored_k, 1.0 / (math.sqrt(k) * self._spreads[rate]))
        yield self._vector(f"{module}.svh", n, stored_n, 1.0)
        if self._codebook.multiplier is not None:
            marker = np.array(self._codebook.multiplier, dtype=np.uint32).view(np.int32)
            yield of_array(f"{module}.{self._codebook.marker}", marker)
        if biased:
            yield self.normal(f"{module}.bias", (n,), 0.1, stored=stored_n)

    def normal(self, name: str, shape: tuple[int, ...], deviation: float, stored: int | None = None) -> PlannedTensor:
        """A float16 tensor of about normal values, the last axis followed by zeros up to `stored`."""
        full = (*shape[:-1], stored or shape[-1])

        def chunks() -> Chunks:
            rows = math.prod(shape[:-1])
            uniform = self._uniform(name, 4 * rows * shape[-1]).reshape(4, rows, shape[-1])
            values = (uniform.sum(axis=0) - 2.0) * math.sqrt(3.0) * deviation  # four uniforms have variance 1/3
            padded = np.zeros((rows, full[-1]), dtype="<f2")
            padded[:, : shape[-1]] = values
            yield padded.reshape(-1).view(np.uint8)

        return PlannedTensor(name, "F16", full, chunks)

    def ones(self, name: str, channels: int) -> PlannedTensor:
        """A float16 vector of ones."""
        return of_array(name, np.ones(channels, dtype=np.float16))

    def _vector(self, name: str, channels: int, stored: int, magnitude: float) -> PlannedTensor:
        """Random signs times magnitudes within a factor of sqrt(2) of one; zeros beyond the true channels."""

        def chunks() -> Chunks:
            uniform = self._uniform(name, 2 * channels)
            signs = np.where(uniform[:channels] < 0.5, -1.0, 1.0)
            values = np.zeros(stored, dtype="<f2")
            values[:channels] = signs * magnitude * np.exp2(uniform[channels:] - 0.5)
            yield values.view(np.uint8)

        return PlannedTensor(name, "F16", (stored,), chunks)

    def _uniform(self, name: str, count: int) -> npt.NDArray[np.float64]:
        raw = _generator(self._spec.seed, name).random_raw(count)
        result: npt.NDArray[np.float64] = (raw >> np.uint64(11)) * 2.0**-53
        return result

    def _codes(self, name: str, nbytes: int) -> Callable[[], Chunks]:
        def chunks() -> Chunks:
            if self._spec.sparse:
                yield nbytes
                return
            generator = _generator(self._spec.seed, name)
            for begin in range(0, nbytes, CHUNK_BYTES):
                words = generator.random_raw(min(CHUNK_BYTES, nbytes - begin) // 8)
                yield words.astype("<u8", copy=False).view(np.uint8)

        return chunks
