"""Owns the grouping of EXL3 linears into layers of experts, and the checks across them.  It must not read tensor data."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from trellis_format.checkpoint import Checkpoint
from trellis_format.errors import FormatError, FormatValueError
from trellis_format.exl3.linear import LINEAR_SUFFIXES, Exl3Linear, describe_linear
from trellis_format.exl3.names import DEFAULT_PATTERN, ExpertName, compile_pattern, match_expert
from trellis_format.files.arrays import FileArray
from trellis_format.model_config import ModelConfig, parse_model_config
from trellis_format.source import Projection

__all__ = ["Exl3Layer", "Exl3Modules", "LayerKey", "find_layer", "find_layers", "group_modules"]

_AUXILIARY_PREFIX = re.compile(r"(^|\.)mtp(\.|$)")


@dataclass(frozen=True, order=True)
class LayerKey:
    """A layer of experts: its index, and the path of its experts in the checkpoint."""

    index: int
    prefix: str


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
    modules = {name[: -len(".trellis")] for name in tensors if name.endswith(".trellis")}
    linears: dict[str, dict[str, FileArray]] = {module: {} for module in modules}
    others = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module in modules and suffix in LINEAR_SUFFIXES:
            linears[module][suffix] = tensor
        else:
            others[name] = tensor
    return Exl3Modules(linears, others)


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
        if not name.endswith(".trellis"):
            continue
        module = name[: -len(".trellis")]
        expert = match_expert(module, compiled)
        if expert is not None:
            layers.setdefault(LayerKey(expert.layer, expert.prefix), {})[module] = expert
    return dict(sorted(layers.items()))


def find_layer(checkpoint: Checkpoint, layer: int | LayerKey, *, pattern: str = DEFAULT_PATTERN) -> Exl3Layer:
    """Describe the experts of one layer.

    Args:
        checkpoint: an opened checkpoint.
        layer: its index in the main stack, or its key where an index is not unique.
        pattern: regular expression of expert names.

    Raises:
        FormatTypeError, FormatValueError: if the layer has no experts, an expert or a projection is missing, a linear
            breaks a rule, or experts differ in size; names layer, expert, projection and both numbers.
    """
    layers = find_layers(checkpoint, pattern=pattern)
    key = layer if isinstance(layer, LayerKey) else _unique_key(checkpoint, layer, layers)
    if key not in layers:
        raise FormatValueError(f"no experts under {key.prefix!r}", file=checkpoint.path)
    config = parse_model_config(checkpoint.config, file=str(checkpoint.path / "config.json"))
    table: dict[int, dict[Projection, Exl3Linear]] = {}
    for module, name in layers[key].items():
        row = table.setdefault(name.expert, {})
        if name.projection in row:
            raise FormatValueError(
                f"expert {name.expert} has two {name.projection} linears: {row[name.projection].name} and {module}",
                file=checkpoint.path,
            )
        row[name.projection] = describe_linear(module, _module_tensors(checkpoint.tensors, module))
    _check_complete(checkpoint, key, table, config)
    experts = tuple(table[index] for index in range(len(table)))
    _check_sizes(checkpoint, key, experts)
    return Exl3Layer(key, experts, config)


def _module_tensors(tensors: dict[str, FileArray], module: str) -> dict[str, FileArray]:
    names = ((suffix, f"{module}.{suffix}") for suffix in LINEAR_SUFFIXES)
    return {suffix: tensors[name] for suffix, name in names if name in tensors}


def _unique_key(checkpoint: Checkpoint, index: int, layers: Iterable[LayerKey]) -> LayerKey:
    keys = list(layers)
    here = [key for key in keys if key.index == index]
    main = [key for key in here if not _AUXILIARY_PREFIX.search(key.prefix)] or here
    if not main:
        known = sorted({key.index for key in keys})
        text = f"layers with experts: {_ranges(known)}" if known else "no layer of this checkpoint has EXL3 experts"
        raise FormatValueError(f"layer {index} has no experts; {text}", file=checkpoint.path)
    if len(main) > 1:
        raise FormatValueError(
            f"layer {index} has experts under {len(main)} paths: {', '.join(key.prefix for key in main)}; name one",
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
    checkpoint: Checkpoint, key: LayerKey, table: dict[int, dict[Projection, Exl3Linear]], config: ModelConfig
) -> None:
    declared = config.expert_count()
    count = max(declared or 0, max(table) + 1)
    present = {projection for row in table.values() for projection in row}
    needed = [projection for projection in Projection if projection in present | {Projection.UP, Projection.DOWN}]
    for projection in needed:
        having = [index for index, row in table.items() if projection in row]
        if len(having) < count:
            absent = next(index for index in range(count) if index not in set(having))
            source = f"config.json declares {declared}" if declared == count else f"the highest index is {max(table)}"
            raise FormatValueError(
                f"layer {key.index}: expert {absent} has no {projection} linear; {len(having)} of {count} experts have "
                f"one ({source})",
                file=checkpoint.path,
                tensor=key.prefix,
            )


def _check_sizes(checkpoint: Checkpoint, key: LayerKey, experts: tuple[dict[Projection, Exl3Linear], ...]) -> None:
    down = experts[0][Projection.DOWN]
    hidden, width = down.n, down.k
    for index, row in enumerate(experts):
        for projection, linear in row.items():
            expected = (width, hidden) if projection is Projection.DOWN else (hidden, width)
            if (linear.k, linear.n) != expected:
                raise FormatValueError(
                    f"layer {key.index}: expert {index} {projection} is {linear.k} x {linear.n}, the down linear of "
                    f"expert 0 ({width} x {hidden}) needs {expected[0]} x {expected[1]}",
                    file=linear.file,
                    tensor=linear.name,
                )
            if ("bias" in linear.tensors) != ("bias" in experts[0][projection].tensors):
                raise FormatValueError(
                    f"layer {key.index}: expert {index} {projection} differs from expert 0 in having a bias",
                    file=linear.file,
                    tensor=linear.name,
                )


def try_describe(name: str, tensors: dict[str, FileArray]) -> Exl3Linear | FormatError:
    """Describe a linear, or give the error that refuses it: for reports that go on."""
    try:
        return describe_linear(name, tensors)
    except FormatError as error:
        return error
