"""Owns the grouping of EXL3 linears into layers of experts, and the checks across them.

It must not read tensor data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trellis_format.activations import Activation
from trellis_format.checkpoint import CONFIG_NAME, Checkpoint
from trellis_format.errors import FormatValueError
from trellis_format.exl3.declared import read_declared
from trellis_format.exl3.linear import LINEAR_SUFFIXES, Exl3Linear, describe_linear
from trellis_format.exl3.names import DEFAULT_PATTERN, ExpertName, compile_pattern, match_expert
from trellis_format.files.arrays import FileArray
from trellis_format.model_config import ModelConfig, parse_model_config
from trellis_format.source import Projection

__all__ = [
    "Exl3Layer",
    "Exl3Modules",
    "LayerKey",
    "build_layer",
    "example_trellis",
    "find_layer",
    "find_layers",
    "group_modules",
]

_AUXILIARY_PREFIX = re.compile(r"(^|\.)mtp(\.|$)")
_TRELLIS = ".trellis"

_Table = dict[int, dict[Projection, Exl3Linear]]


@dataclass(frozen=True, order=True)
class LayerKey:
    """A layer of experts: its index, and the path of its experts in the checkpoint."""

    index: int
    prefix: str

    @property
    def auxiliary(self) -> bool:
        """Whether the layer belongs to a multi-token-prediction head and not to the main stack."""
        return _AUXILIARY_PREFIX.search(self.prefix) is not None


@dataclass(frozen=True)
class Exl3Layer:
    """The routed experts of one layer as their headers describe them.

    Attributes:
        key: index and path.
        experts: `[experts]` of linears by projection, complete and of one geometry.
        config: what the model's configuration says.
    """

    key: LayerKey
    experts: tuple[dict[Projection, Exl3Linear], ...]
    config: ModelConfig

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections of every expert, in order."""
        return tuple(projection for projection in Projection if projection in self.experts[0])

    @property
    def file(self) -> str:
        """Path of the shard with the first expert's codes."""
        return self.experts[0][Projection.DOWN].file


@dataclass(frozen=True)
class Exl3Modules:
    """The tensors of a checkpoint by EXL3 module; what is no part of one is in `others`."""

    linears: dict[str, dict[str, FileArray]]
    others: dict[str, FileArray]


def group_modules(tensors: dict[str, FileArray]) -> Exl3Modules:
    """Group tensors by module: those with a `trellis` beside them are linears' (or embeddings', by rank)."""
    modules = {name[: -len(_TRELLIS)] for name in tensors if name.endswith(_TRELLIS)}
    linears: dict[str, dict[str, FileArray]] = {module: {} for module in sorted(modules)}
    others = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module in modules and suffix in LINEAR_SUFFIXES:
            linears[module][suffix] = tensor
        else:
            others[name] = tensor
    return Exl3Modules(linears, others)


def example_trellis(tensors: Mapping[str, FileArray]) -> FileArray | None:
    """The first tensor by name that makes a checkpoint EXL3, a 3-D int16 trellis with its vectors, or None."""
    for name in sorted(name for name in tensors if name.endswith(_TRELLIS)):
        tensor, module = tensors[name], name[: -len(_TRELLIS)]
        vectors = all(any(f"{module}.{word}" in tensors for word in pair) for pair in (("suh", "su"), ("svh", "sv")))
        if vectors and len(tensor.shape) == 3 and tensor.entry.dtype == "I16":
            return tensor
    return None


def find_layers(checkpoint: Checkpoint, *, pattern: str = DEFAULT_PATTERN) -> dict[LayerKey, dict[str, ExpertName]]:
    """The layers that have experts, with their module names, ascending by index.

    Args:
        checkpoint: an opened checkpoint.
        pattern: regular expression of expert names; see `DEFAULT_PATTERN`.

    Raises:
        FormatUnsupportedError: if names are of the rank-sliced dialect.
        FormatValueError: if the pattern is not usable.
    """
    compiled = compile_pattern(pattern)
    layers: dict[LayerKey, dict[str, ExpertName]] = {}
    for name in checkpoint.tensors:
        if not name.endswith(_TRELLIS):
            continue
        module = name[: -len(_TRELLIS)]
        expert = match_expert(module, compiled)
        if expert is not None:
            layers.setdefault(LayerKey(expert.layer, expert.prefix), {})[module] = expert
    return dict(sorted(layers.items()))


def find_layer(
    checkpoint: Checkpoint,
    layer: int | LayerKey,
    *,
    pattern: str = DEFAULT_PATTERN,
    ignore_method: bool = False,
    activation: Activation | None = None,
) -> Exl3Layer:
    """Describe the experts of one layer.

    Args:
        checkpoint: an opened checkpoint.
        layer: its index in the main stack, or its key where an index is not unique.
        pattern: regular expression of expert names.
        ignore_method: trust the tensors where a configuration states another `quant_method`.
        activation: the caller's law between the GEMMs; None holds the gate to what `config.json` states.

    Raises:
        FormatTypeError, FormatValueError: if the layer has no experts, an expert or a projection is missing, a linear
            breaks a rule, experts differ in size, or a configuration contradicts the tensors; names layer, expert,
            projection and both values.
        FormatUnsupportedError: if names are of the rank-sliced dialect.
    """
    layers = find_layers(checkpoint, pattern=pattern)
    declared = read_declared(checkpoint)
    if not ignore_method:
        declared.check_method(example_trellis(checkpoint.tensors))
    key = layer if isinstance(layer, LayerKey) else _unique_key(checkpoint, layer, layers)
    if key not in layers:
        raise FormatValueError(f"no experts under {key.prefix!r}", file=checkpoint.path)
    linears = {module: describe_linear(module, _module_tensors(checkpoint.tensors, module)) for module in layers[key]}
    for linear in linears.values():
        declared.check_linear(linear)
    config = parse_model_config(checkpoint.config, file=str(checkpoint.path / CONFIG_NAME))
    return build_layer(checkpoint.path, key, layers[key], linears, config, activation=activation)


def build_layer(
    path: Path,
    key: LayerKey,
    names: Mapping[str, ExpertName],
    linears: Mapping[str, Exl3Linear],
    config: ModelConfig,
    *,
    activation: Activation | None = None,
) -> Exl3Layer:
    """Put the described linears of one layer together.

    Args:
        path: the checkpoint, named in errors.
        key: the layer.
        names: what the module names say.
        linears: the linears, by the same module names.
        config: the model's configuration.
        activation: the caller's law between the GEMMs; None holds the gate to what `config.json` states.

    Raises:
        FormatValueError: if an expert or a projection is missing or double, a gate included where the configuration's
            activation takes one, or sizes differ.
    """
    table: _Table = {}
    for module, name in names.items():
        row = table.setdefault(name.expert, {})
        if name.projection in row:
            raise FormatValueError(
                f"layer {key.index}: expert {name.expert} has two {name.projection} linears: "
                f"{row[name.projection].name} and {module}",
                file=path,
            )
        row[name.projection] = linears[module]
    _check_complete(path, key, table, config, activation)
    experts = tuple(table[index] for index in range(len(table)))
    _check_sizes(key, experts)
    _check_biases(key, experts)
    return Exl3Layer(key, experts, config)


def _module_tensors(tensors: dict[str, FileArray], module: str) -> dict[str, FileArray]:
    names = ((suffix, f"{module}.{suffix}") for suffix in LINEAR_SUFFIXES)
    return {suffix: tensors[name] for suffix, name in names if name in tensors}


def _unique_key(checkpoint: Checkpoint, index: int, layers: Iterable[LayerKey]) -> LayerKey:
    keys = list(layers)
    here = [key for key in keys if key.index == index]
    main = [key for key in here if not key.auxiliary] or here
    if not main:
        known = sorted({key.index for key in keys})
        text = f"layers with experts: {_ranges(known)}" if known else "no layer of this checkpoint has EXL3 experts"
        raise FormatValueError(f"layer {index} has no experts; {text}", file=checkpoint.path)
    if len(main) > 1:
        raise FormatValueError(
            f"layer {index} has experts under {len(main)} paths: {', '.join(key.prefix for key in main)}; name one: "
            "--pattern can match one of them alone, and in Python a LayerKey stands for the index",
            file=checkpoint.path,
        )
    return main[0]


def _ranges(numbers: list[int]) -> str:
    """Ascending integers as ranges, for example 0, 2-5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(str(bound) for bound in part) for part in parts)


def _check_complete(
    path: Path, key: LayerKey, table: _Table, config: ModelConfig, activation: Activation | None
) -> None:
    declared = config.expert_count()
    count = max(declared or 0, max(table) + 1)
    present = {projection for row in table.values() for projection in row}
    law = config.activation() if activation is None and Projection.GATE not in present else None
    gated = {Projection.GATE} if law is not None and law.gated else set()
    wanted = present | gated | {Projection.UP, Projection.DOWN}
    needed = [projection for projection in Projection if projection in wanted]
    for projection in needed:
        having = {index for index, row in table.items() if projection in row}
        if len(having) < count:
            absent = next(index for index in range(count) if index not in having)
            why = f"; {CONFIG_NAME} {config.activation_key()} takes a gate" if projection in gated else ""
            source = f"config.json declares {declared}" if declared == count else f"the highest index is {max(table)}"
            raise FormatValueError(
                f"layer {key.index}: expert {absent} has no {projection} linear; {len(having)} of {count} experts have "
                f"one ({source}{why})",
                file=path,
                tensor=key.prefix,
                numbers={"observed": len(having), "expected": count},
            )


def _check_sizes(key: LayerKey, experts: tuple[dict[Projection, Exl3Linear], ...]) -> None:
    first = experts[0][Projection.DOWN]
    for index, row in enumerate(experts):
        down = row[Projection.DOWN]
        wrong = [linear for linear in row.values() if linear is not down and (linear.k, linear.n) != (down.n, down.k)]
        if wrong:
            shapes = ", ".join(f"{word} {row[word].k} x {row[word].n}" for word in Projection if word in row)
            raise FormatValueError(
                f"layer {key.index}: the linears of expert {index} disagree: {shapes}; gate and up must be hidden x "
                "intermediate channels, down intermediate x hidden",
                file=wrong[0].file,
                tensor=f"{wrong[0].name}.trellis",
                numbers={"k": wrong[0].k, "n": wrong[0].n, "expected_k": down.n, "expected_n": down.k},
            )
        if (down.k, down.n) != (first.k, first.n):
            raise FormatValueError(
                f"layer {key.index}: experts 0 and {index} differ in size: down is {first.k} x {first.n} in expert 0 "
                f"and {down.k} x {down.n} in expert {index}",
                file=down.file,
                tensor=f"{down.name}.trellis",
                numbers={"k": down.k, "n": down.n, "expected_k": first.k, "expected_n": first.n},
            )


def _check_biases(key: LayerKey, experts: tuple[dict[Projection, Exl3Linear], ...]) -> None:
    for projection, first in experts[0].items():
        for index, row in enumerate(experts):
            if ("bias" in row[projection].tensors) != ("bias" in first.tensors):
                raise FormatValueError(
                    f"layer {key.index}: expert {index} {projection} differs from expert 0 in having a bias",
                    file=row[projection].file,
                    tensor=f"{row[projection].name}.bias",
                )
