"""Owns what an EXL3 checkpoint states about itself, and the layout of its directory.  It must not make tensors.

The directory holds shards, an index where there are several, `config.json` with an object `quantization_config`, and
`quantization_config.json` with that object again and a table `tensor_storage` of modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, QUANTIZATION_CONFIG_NAME
from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.errors import FormatValueError
from trellis_format.exl3.declared import EXL3_METHOD
from trellis_format.rates import TILE, Rate
from trellis_format.version import version
from trellis_format.writer import OutputDirectory, PlannedTensor, deal_shards, index_object, shard_name, write_shard

__all__ = ["quantization_object", "tensor_storage", "write_exl3"]

_STATED_DTYPES = {
    "BOOL": "torch.bool", "U8": "torch.uint8", "I8": "torch.int8", "I16": "torch.int16", "F16": "torch.float16",
    "BF16": "torch.bfloat16", "I32": "torch.int32", "F32": "torch.float32", "I64": "torch.int64",
    "F64": "torch.float64",
}  # fmt: skip
_MARKED = {codebook.marker: codebook for codebook in EXL3_CODEBOOKS.values() if codebook.marker is not None}


def quantization_object(tensors: Sequence[PlannedTensor], *, codebook: str, head_bits: float | None) -> dict[str, Any]:
    """The object `quantization_config` of a checkpoint.

    Args:
        tensors: all of them.
        codebook: its name.
        head_bits: K of the projection to the vocabulary, None where it is not quantised.
    """
    codes = [tensor for tensor in tensors if _is_trellis(tensor)]
    weights = sum(tensor.shape[0] * tensor.shape[1] * TILE * TILE for tensor in codes)
    stated: dict[str, Any] = {
        "quant_method": EXL3_METHOD,
        "version": f"trellis-format {version()}",
        "bits": round(8 * sum(tensor.nbytes for tensor in codes) / weights, 2) if weights else 0.0,
        "codebook": codebook,
    }
    return stated if head_bits is None else stated | {"head_bits": head_bits}


def tensor_storage(tensors: Sequence[PlannedTensor]) -> dict[str, Any]:
    """The table `tensor_storage`: each module's tensors, and for a linear K and the multiplier of its codebook."""
    modules: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        module, _, suffix = tensor.name.rpartition(".")
        entry = modules.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][tensor.name] = {
            "shape": list(tensor.shape),
            "n_bytes": tensor.nbytes,
            "dtype": _STATED_DTYPES.get(tensor.dtype, tensor.dtype),
        }
        if _is_trellis(tensor):
            rate = Rate.from_width(tensor.shape[2])
            entry |= {"quant_format": EXL3_METHOD, "bits_per_weight": rate.bits if rate.is_half else int(rate.bits)}
        elif suffix in _MARKED and tensor.shape == ():
            entry[f"{suffix}_multiplier"] = _MARKED[suffix].multiplier
    return modules


def write_exl3(
    directory: OutputDirectory,
    tensors: Sequence[PlannedTensor],
    *,
    config: Mapping[str, Any] | None,
    quantization: Mapping[str, Any] | None,
    shards: int = 1,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Fill a directory with a checkpoint; shards that are there already are taken as complete.

    Args:
        directory: entered.
        tensors: all of them, in the order in which they are dealt to shards.
        config: content of `config.json`, `quantization_config` included; None for no such file.
        quantization: content of `quantization_config.json`, `tensor_storage` excluded; None for no such file.
        shards: most shards to write.
        on_bytes: told of each piece of tensor data that was written, in bytes.

    Raises:
        FormatValueError: if two tensors have one name, the number of shards is not positive, or as `write_shard`
            raises.
    """
    if len({tensor.name for tensor in tensors}) < len(tensors):
        repeated = next(name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1)
        raise FormatValueError("two tensors of the checkpoint have this name", file=directory.path, tensor=repeated)
    dealt = deal_shards(tensors, shards)
    named = {shard_name(number, len(dealt)): shard for number, shard in enumerate(dealt)}
    for name, shard in named.items():
        if not directory.has(name):
            write_shard(directory.file(name), shard, metadata={"format": "pt"}, on_bytes=on_bytes)
        elif on_bytes is not None:
            on_bytes(sum(tensor.nbytes for tensor in shard))
    if len(named) > 1:
        directory.write_json(INDEX_NAME, index_object(named))
    if config is not None:
        directory.write_json(CONFIG_NAME, config)
    if quantization is not None:
        directory.write_json(QUANTIZATION_CONFIG_NAME, {**quantization, "tensor_storage": tensor_storage(tensors)})


def _is_trellis(tensor: PlannedTensor) -> bool:
    return tensor.name.endswith(".trellis") and tensor.dtype == "I16" and len(tensor.shape) == 3
