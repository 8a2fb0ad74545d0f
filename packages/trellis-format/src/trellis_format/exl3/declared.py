"""Owns what configuration files state about quantisation, and holds tensors to it.  It must not read tensor data.

`config.json` has an object `quantization_config`; `quantization_config.json` is that object again with a table
`tensor_storage` of modules.  Tensors decide what a file is; a statement that contradicts them is an error, because one
of the two is then not of this model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from trellis_format.checkpoint import CONFIG_NAME, QUANTIZATION_CONFIG_NAME, Checkpoint
from trellis_format.codebooks import EXL3_CODEBOOKS, Codebook
from trellis_format.errors import FormatValueError
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.files.arrays import FileArray

__all__ = ["EXL3_METHOD", "DeclaredQuantization", "Statement", "read_declared"]

EXL3_METHOD = "exl3"
"""Value of `quant_method` in configurations of EXL3 files."""
_STATED_KEYS = ("quant_method", "version", "bits", "head_bits", "out_scales", "codebook")
_TEXT_KEYS = ("quant_method", "codebook")
_MARKED = {codebook.marker: codebook for codebook in EXL3_CODEBOOKS.values() if codebook.marker is not None}


@dataclass(frozen=True)
class Statement:
    """One value that a file states, as text.

    Attributes:
        value: what it says.
        file: path of the file.
        field: path of the key in it, with dots.
    """

    value: str
    file: str
    field: str

    def __str__(self) -> str:
        return f"{self.file} says {self.field} = {self.value!r}"


@dataclass(frozen=True)
class DeclaredQuantization:
    """What a checkpoint's configuration files state about its quantisation.

    Attributes:
        statements: what they state about the whole model.
        storage: `tensor_storage` by module, empty where there is none.
        storage_file: path of the file with `tensor_storage`, None where there is none.
    """

    statements: tuple[Statement, ...] = ()
    storage: Mapping[str, Any] = field(default_factory=dict, repr=False)
    storage_file: str | None = None

    def of(self, key: str) -> tuple[Statement, ...]:
        """The statements of one key, such as `codebook`."""
        return tuple(statement for statement in self.statements if statement.field.rpartition(".")[2] == key)

    @cached_property
    def _codebooks(self) -> tuple[Statement, ...]:
        return self.of("codebook")

    def check_method(self, example: FileArray | None) -> None:
        """Accept a stated method that agrees with the tensors.

        Args:
            example: an EXL3 trellis of the checkpoint, None where it has none.

        Raises:
            FormatValueError: if a file states another method and there is such a tensor, or states EXL3 and there is
                none; names the files, the fields and the tensor.
        """
        for stated in self.of("quant_method"):
            said = f"{stated.field} = {stated.value!r}"  # the file is the error's
            if example is not None and stated.value != EXL3_METHOD:
                raise FormatValueError(
                    f"{said}, but {example.file} holds {example.entry.name}, an EXL3 trellis "
                    f"({example.entry.dtype} {list(example.shape)}): quant_method must be {EXL3_METHOD!r}",
                    file=stated.file,
                    tensor=example.entry.name,
                )
            if example is None and stated.value == EXL3_METHOD:
                raise FormatValueError(
                    f"{said}, but no shard holds an EXL3 trellis (3-D int16 with its vectors)", file=stated.file
                )

    def check_linear(self, linear: Exl3Linear) -> None:
        """Accept a linear that agrees with what is stated about codebook and rate.

        Raises:
            FormatValueError: if a statement contradicts it; names both values and both sources.
        """
        for stated in self._codebooks:
            if stated.value != linear.codebook.name:
                raise FormatValueError(
                    f"{stated}, {_found(linear.codebook)}", file=linear.file, tensor=f"{linear.name}.trellis"
                )
        entry = self.storage.get(linear.name)
        if entry is None or self.storage_file is None:
            return
        where = f"tensor_storage[{linear.name!r}]"
        if not isinstance(entry, dict):
            raise FormatValueError(f"{where} must be an object", file=self.storage_file)
        self._check_rate(linear, entry, where)
        self._check_multiplier(linear, entry, where)

    def _check_rate(self, linear: Exl3Linear, entry: dict[str, Any], where: str) -> None:
        stated = entry.get("bits_per_weight")
        if stated is None:
            return
        if isinstance(stated, bool) or not isinstance(stated, int | float) or stated * 2 != linear.rate.half_bits:
            raise FormatValueError(
                f"{Statement(str(stated), str(self.storage_file), f'{where}.bits_per_weight')}, the trellis is "
                f"{linear.rate.tile_words16} words wide, which is K = {linear.rate}",
                file=linear.file,
                tensor=f"{linear.name}.trellis",
                numbers={"stated": stated, "observed": linear.rate.bits} if isinstance(stated, int | float) else None,
            )

    def _check_multiplier(self, linear: Exl3Linear, entry: dict[str, Any], where: str) -> None:
        for marker, codebook in _MARKED.items():
            key = f"{marker}_multiplier"
            stated = entry.get(key)
            if stated is None:
                continue
            text = _hex(stated)
            statement = Statement(text, str(self.storage_file), f"{where}.{key}")
            if codebook is not linear.codebook:
                raise FormatValueError(
                    f"{statement}, {_found(linear.codebook)}", file=linear.file, tensor=f"{linear.name}.trellis"
                )
            if text != _hex(codebook.multiplier):
                raise FormatValueError(
                    _other_multiplier(str(statement), codebook), file=linear.file, tensor=f"{linear.name}.{marker}"
                )


def read_declared(checkpoint: Checkpoint) -> DeclaredQuantization:
    """Collect what the configuration files state.

    Args:
        checkpoint: an opened checkpoint.

    Raises:
        FormatValueError: if a key that concerns quantisation has the wrong type, or the multiplier of a codebook is
            another one; names file and key.
    """
    statements: list[Statement] = []
    storage: Mapping[str, Any] = {}
    storage_file = None
    for name, value, path in _objects(checkpoint):
        file = str(checkpoint.path / name)
        if not isinstance(value, dict):
            raise FormatValueError(f"{path or 'the file'} must be an object, got {type(value).__name__}", file=file)
        for key in _STATED_KEYS:
            stated = value.get(key)
            where = f"{path}.{key}" if path else key
            if key in _TEXT_KEYS and not isinstance(stated, str | None):
                raise FormatValueError(f"{where} must be a string, got {type(stated).__name__}", file=file)
            if isinstance(stated, str | int | float):
                statements.append(Statement(str(stated), file, where))
        _check_options(value.get("experimental_options"), f"{path}." if path else "", file)
        if "tensor_storage" in value and name == QUANTIZATION_CONFIG_NAME:
            storage, storage_file = value["tensor_storage"], file
            if not isinstance(storage, dict):
                raise FormatValueError(f"tensor_storage must be an object, got {type(storage).__name__}", file=file)
    return DeclaredQuantization(tuple(statements), storage, storage_file)


def _check_options(options: Any, path: str, file: str) -> None:
    """Hold stated multipliers to the constants: kernels obeyed them when converters of 2025 took them as options."""
    where = f"{path}experimental_options"
    if not isinstance(options, dict | None):
        raise FormatValueError(f"{where} must be an object, got {type(options).__name__}", file=file)
    for marker, codebook in _MARKED.items():
        key = f"{marker}_multiplier"
        stated = (options or {}).get(key)
        if stated is not None and _hex(stated) != _hex(codebook.multiplier):
            raise FormatValueError(_other_multiplier(f"{where}.{key} = {_hex(stated)!r}", codebook), file=file)


def _hex(multiplier: Any) -> str:
    """A multiplier as text: integers, also negative ones of 32 bits and such text, as unsigned hexadecimal."""
    if isinstance(multiplier, str):
        with contextlib.suppress(ValueError):
            multiplier = int(multiplier[:32], 0)
    if isinstance(multiplier, bool) or not isinstance(multiplier, int) or not -(1 << 31) <= multiplier < 1 << 32:
        return str(multiplier)
    return f"0x{multiplier & 0xFFFFFFFF:08X}"


def _other_multiplier(statement: str, codebook: Codebook) -> str:
    return (
        f"{statement}, codebook {codebook.name} has {_hex(codebook.multiplier)}: files with another multiplier are "
        "refused, since their codes have another meaning"
    )


def _objects(checkpoint: Checkpoint) -> list[tuple[str, Any, str]]:
    """(file name, object, path of the object in it) of every object that speaks about quantisation."""
    found: list[tuple[str, Any, str]] = []
    config = checkpoint.config or {}
    for path, holder in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(holder, dict) and holder.get("quantization_config") is not None:
            found.append((CONFIG_NAME, holder["quantization_config"], f"{path}quantization_config"))
    if checkpoint.quantization_config is not None:
        found.append((QUANTIZATION_CONFIG_NAME, checkpoint.quantization_config, ""))
    return found


def _found(codebook: Codebook) -> str:
    if codebook.marker is None:
        return f"expected one of {', '.join(map(str, _MARKED))}; found none, so {codebook.name}"
    return f"the marker tensor {codebook.marker} says {codebook.name}"
