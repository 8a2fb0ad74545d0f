"""Owns the conversion of a checkpoint to another container: without loss or not at all, resumable, whole or absent.

It must not know how a container lies on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trellis_format.convert_files import carried_files
from trellis_format.convert_source import ConvertSource, Exl3Source
from trellis_format.convert_target import TARGETS
from trellis_format.errors import FormatArgumentError, FormatValueError
from trellis_format.exl3.writer import write_exl3
from trellis_format.source import TrellisSource
from trellis_format.writer import OutputDirectory, PlannedTensor

__all__ = [
    "ASSUMED_BYTES_PER_SECOND",
    "DEFAULT_SHARD_BYTES",
    "ConvertPlan",
    "check_shards",
    "convert",
    "parse_layers",
    "plan_conversion",
]

ASSUMED_BYTES_PER_SECOND = 300_000_000
"""Speed that the time of a plan assumes."""
DEFAULT_SHARD_BYTES = 8 << 30
"""Bytes of a shard where no number of shards is given."""


@dataclass(frozen=True)
class ConvertPlan:
    """What a conversion will do.

    Attributes:
        source: container that is read.
        target: container that is written.
        layers: indices of the layers whose experts are carried.
        left_out: indices of the layers whose experts are not.
        code_bytes: bytes of codes that are written.
        scale_bytes: bytes of scales, signs and biases that are written.
        outside_bytes: bytes of other tensors that are written.
        file_bytes: bytes of other files, copied or written anew.
    """

    source: str
    target: str
    layers: tuple[int, ...]
    left_out: tuple[int, ...]
    code_bytes: int
    scale_bytes: int
    outside_bytes: int
    file_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.code_bytes + self.scale_bytes + self.outside_bytes + self.file_bytes

    @property
    def seconds(self) -> float:
        """Time at `ASSUMED_BYTES_PER_SECOND`."""
        return self.nbytes / ASSUMED_BYTES_PER_SECOND


def parse_layers(text: str) -> tuple[int, ...]:
    """Indices from text such as `0,2-5`, ascending.

    Raises:
        FormatArgumentError: if a part is neither an index nor an ascending range, or there are more than 100,000.
    """
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        bounds = (first, last if dash else first)
        if not all(bound.isascii() and bound.isdigit() for bound in bounds):
            known = "neither an index nor a range such as 2-5"
            raise FormatArgumentError(f"layers {text[:80]!r}: {part[:20]!r} is {known}")
        low, high = (int(bound) if len(bound) < 10 else -1 for bound in bounds)
        if not 0 <= low <= high or high - low > 100_000:
            rule = "must ascend over at most 100,000 layers, below 1,000,000,000"
            raise FormatArgumentError(f"layers {text[:80]!r}: range {part[:20]!r} {rule}")
        found |= set(range(low, high + 1))
    return tuple(sorted(found))


def check_shards(shards: int) -> None:
    """Accept a number of shards.

    Raises:
        FormatArgumentError: if it is not positive.
    """
    if shards < 1:
        raise FormatArgumentError(f"{shards} shards: at least 1 is needed")


def plan_conversion(source: ConvertSource, target: str, *, layers: Sequence[int] | None = None) -> ConvertPlan:
    """Say what a conversion will do, having read headers and scales but no codes.

    Args:
        source: an opened checkpoint.
        target: name of the container to write.
        layers: indices of the layers whose experts to carry (default: all).

    Raises:
        FormatUnsupportedError: if the target cannot hold a layer without loss; has the layer and the reason.
        FormatArgumentError: if the target or a layer is not known.
        FormatValueError: if a layer breaks a rule.
    """
    return _Conversion(source, target, layers).plan


def convert(
    source: ConvertSource,
    destination: str | os.PathLike[str],
    target: str,
    *,
    layers: Sequence[int] | None = None,
    shards: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ConvertPlan:
    """Write a checkpoint again in another container, or EXL3 dealt to other shards.

    Codes, scales and biases are copied bit for bit, tensors outside of experts and other files as they are, but for
    what configuration files state about quantisation (see `trellis_format.convert_files`).  The destination appears
    when it is complete; after an interruption the same call continues.

    Args:
        source: an opened checkpoint.
        destination: directory to write; it must not exist, or be empty.
        target: name of the container to write.
        layers: indices of the layers whose experts to carry (default: all); those of others are left out.
        shards: most shards to write (default: as many as make them `DEFAULT_SHARD_BYTES` at most).
        on_progress: told of the bytes that are written and of all bytes to write, again and again.

    Returns:
        What was done.

    Raises:
        FormatUnsupportedError: if the target cannot hold a layer without loss; has the layer and the reason.
        FormatArgumentError: if a layer is not known or the number of shards not positive.
        FormatValueError: if the destination exists or cannot be written, or a file of the source breaks a rule.
    """
    if shards is not None:
        check_shards(shards)
    work = _Conversion(source, target, layers)
    plan = work.plan
    count = max(-(-plan.nbytes // DEFAULT_SHARD_BYTES), 1) if shards is None else shards
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(min(done, plan.nbytes), plan.nbytes)

    with OutputDirectory(destination, fingerprint=_fingerprint(source, plan, count), resumable=True) as directory:
        work.write(directory, count, advance)
        _write_files(work.files, directory)
    return plan


class _Conversion:
    """A conversion whose layers were described and accepted by the target."""

    def __init__(self, source: ConvertSource, target: str, layers: Sequence[int] | None) -> None:
        if target not in TARGETS:
            raise FormatArgumentError(f"unknown container {target!r}; known: {', '.join(TARGETS)}")
        self._source, self._target = source, TARGETS[target]
        chosen = _chosen(source, layers)
        self._sources: dict[int, TrellisSource] = {}
        self._tensors: list[PlannedTensor] | None = None
        if isinstance(source, Exl3Source) and target == source.container:
            self._tensors = [tensor for layer in chosen for tensor in source.linears(layer)]
            codes = sum(tensor.nbytes for tensor in self._tensors if tensor.name.endswith(".trellis"))
            scales = sum(tensor.nbytes for tensor in self._tensors) - codes
        else:
            scales = 0
            for layer in chosen:
                self._sources[layer], weights = source.read_layer(layer, verify=False)
                scales += sum(array.nbytes for array in weights.scale_arrays().values())
            self._target.check(self._sources)
            codes = sum(map(self._target.layer_bytes, self._sources.values()))
        self.plan = ConvertPlan(
            source=source.container,
            target=target,
            layers=chosen,
            left_out=tuple(layer for layer in source.layers if layer not in set(chosen)),
            code_bytes=codes,
            scale_bytes=scales,
            outside_bytes=sum(tensor.nbytes for tensor in source.outside),
            file_bytes=0,
        )
        self.files = carried_files(
            source.files(),
            source.container,
            target,
            self._target.quantization_config(self._sources),
            [source.names[layer].prefix for layer in self.plan.left_out],
        )
        sizes = (len(it) if isinstance(it, bytes) else it.stat().st_size for it in self.files.values())
        self.plan = replace(self.plan, file_bytes=sum(sizes))

    def write(self, directory: OutputDirectory, shards: int, on_bytes: Callable[[int], None]) -> None:
        """Write every tensor."""
        source = self._source
        if self._tensors is not None:
            tensors = [*source.outside, *self._tensors]
            write_exl3(directory, tensors, config=None, quantization=None, shards=shards, on_bytes=on_bytes)
        else:
            self._target.write(
                directory,
                self._sources,
                source.read_layer,
                source.outside,
                source.names,
                shards=shards,
                on_bytes=on_bytes,
            )


def _chosen(source: ConvertSource, layers: Iterable[int] | None) -> tuple[int, ...]:
    if layers is None:
        return source.layers
    chosen = tuple(sorted(set(layers)))
    unknown = [layer for layer in chosen if layer not in source.names]
    if unknown:
        known = ", ".join(map(str, source.layers[:16])) or "none"
        raise FormatArgumentError(f"layer {unknown[0]} has no experts; layers with experts: {known}", file=source.path)
    return chosen


def _fingerprint(source: ConvertSource, plan: ConvertPlan, shards: int) -> str:
    content = [str(source.path.resolve()), source.identity(), plan.target, plan.layers, shards]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write_files(files: Mapping[str, Path | bytes], directory: OutputDirectory) -> None:
    for name, content in files.items():
        if isinstance(content, bytes):
            directory.write_bytes(name, content)
        else:
            try:
                shutil.copyfile(content, directory.file(name))
            except OSError as error:
                raise FormatValueError(f"cannot be copied: {error.strerror or error}", file=content) from error
