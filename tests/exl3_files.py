"""Owns the making of small EXL3 files for tests, sound ones and broken ones.

It writes safetensors bytes itself, so that it can write what no library would.  It must not read them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "MARKERS",
    "Raw",
    "expert_name",
    "header_of",
    "random_layer",
    "random_linear",
    "write_bytes",
    "write_checkpoint",
    "write_json",
    "write_shard",
]

MARKERS = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}
"""Value of each marker tensor."""

_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "float16": "F16", "int32": "I32",
    "uint32": "U32", "float32": "F32", "int64": "I64", "uint64": "U64", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True)
class Raw:
    """A tensor that numpy has no dtype for: a safetensors dtype, a shape, and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensor = npt.NDArray[Any] | Raw


def raw(tensor: Tensor) -> Raw:
    """A tensor as dtype, shape and bytes."""
    if isinstance(tensor, Raw):
        return tensor
    tensor = np.asarray(tensor)  # numpy scalars too
    return Raw(_NAMES[tensor.dtype.name], tensor.shape, np.ascontiguousarray(tensor).tobytes())


def header_of(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], bytes]:
    """The header object and the data of a shard, tensors in the given order without padding."""
    header: dict[str, Any] = {}
    data = b""
    for name, tensor in tensors.items():
        part = raw(tensor)
        offsets = [len(data), len(data) + len(part.data)]
        header[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": offsets}
        data += part.data
    return header, data


def write_bytes(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a shard from a header (an object to encode, or bytes as they are) and data.

    Args:
        path: the file.
        header: JSON object, or bytes.
        data: what follows the header.
        length: the header length to claim; default: the true one.
    """
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if length is None else length) + encoded + data)
    return path


def write_shard(path: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a sound shard."""
    return write_bytes(path, *header_of(tensors))


def write_json(path: Path, value: object) -> Path:
    """Write a JSON file."""
    path.write_text(json.dumps(value))
    return path


def random_linear(
    rng: np.random.Generator,
    name: str,
    k: int,
    n: int,
    *,
    bits: float = 3,
    codebook: str = "mcg",
    bias: type[np.floating[Any]] | None = None,
    packed: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a sound linear of random codes.

    Args:
        rng: source of randomness.
        name: module name.
        k: input channels.
        n: output channels.
        bits: K.
        codebook: its name.
        bias: dtype of a bias, None for none.
        packed: whether signs are packed as in files before the first release.
    """
    words = (k // 16, n // 16, round(16 * bits))
    tensors: dict[str, Tensor] = {f"{name}.trellis": rng.integers(-(2**15), 2**15, words, dtype=np.int16)}
    for plain, short, channels in (("suh", "su", k), ("svh", "sv", n)):
        if packed:
            tensors[f"{name}.{short}"] = rng.integers(-(2**15), 2**15, channels // 16, dtype=np.int16)
        else:
            sign = rng.choice([-1.0, 1.0], channels)
            tensors[f"{name}.{plain}"] = (sign * rng.uniform(0.25, 4.0, channels)).astype(np.float16)
    if codebook in MARKERS:
        tensors[f"{name}.{codebook}"] = np.array(MARKERS[codebook], np.uint32).view(np.int32)
    if bias is not None:
        tensors[f"{name}.bias"] = rng.normal(size=n).astype(bias)
    return tensors


def expert_name(layer: int, expert: int, word: str) -> str:
    """Module name of an expert's linear, as Qwen3-MoE has it."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{word}"


def random_layer(
    rng: np.random.Generator,
    *,
    layer: int = 0,
    experts: int = 2,
    hidden: int = 128,
    intermediate: int = 256,
    words: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
    bits: float | Callable[[int, str], float] = 3,
    codebook: str = "mcg",
    bias: type[np.floating[Any]] | None = None,
    packed: bool = False,
    name: Callable[[int, int, str], str] = expert_name,
) -> dict[str, Tensor]:
    """The tensors of a layer of experts; the last word is down.

    Args:
        rng: source of randomness.
        layer: its index.
        experts: number of experts.
        hidden: hidden channels.
        intermediate: intermediate channels.
        words: names of the projections.
        bits: K, or a function of expert and word.
        codebook: its name.
        bias: dtype of biases, None for none.
        packed: whether signs are packed.
        name: module name of layer, expert and word.
    """
    tensors: dict[str, Tensor] = {}
    for expert in range(experts):
        for word in words:
            k, n = (intermediate, hidden) if word == words[-1] else (hidden, intermediate)
            rate = bits if isinstance(bits, int | float) else bits(expert, word)
            module = name(layer, expert, word)
            tensors |= random_linear(rng, module, k, n, bits=rate, codebook=codebook, bias=bias, packed=packed)
    return tensors


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    config: object = None,
    quantization: object = None,
    shards: int = 1,
    index: bool = False,
) -> Path:
    """Write a checkpoint folder.

    Args:
        folder: created.
        tensors: dealt to the shards in runs.
        config: content of config.json, None for no file.
        quantization: content of quantization_config.json, None for no file.
        shards: number of shards.
        index: whether to write an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    share = math.ceil(len(names) / shards)
    mapping = {}
    for number in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * share : (number + 1) * share]
        write_shard(folder / file, {name: tensors[name] for name in part})
        mapping |= dict.fromkeys(part, file)
    if index:
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": mapping})
    if config is not None:
        write_json(folder / "config.json", config)
    if quantization is not None:
        write_json(folder / "quantization_config.json", quantization)
    return folder
