"""Owns the mutation of sound headers, manifests and configurations, and the check that only own errors come of it.

It must not know which rule a mutation breaks: any outcome is right but a foreign exception or unbounded memory.

    python tests/fuzzing.py --count 200000 --seed 0      a long run; prints the seed of every case that fails
    python tests/fuzzing.py --only 4711                  one case again
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from exl3_files import random_layer, write_checkpoint
from trellis_format.container.adapter import trellis_from_container
from trellis_format.container.manifest import read_manifest as read_container_manifest
from trellis_format.container.reader import read_layer as read_container_layer
from trellis_format.convert import convert, plan_conversion
from trellis_format.convert_source import open_source
from trellis_format.errors import FormatError
from trellis_format.native.layer import trellis_from_native
from trellis_format.native.manifest import read_manifest as read_native_manifest
from trellis_format.native.reader import read_layer as read_native_layer
from trellis_format.validate import validate_checkpoint

__all__ = ["Fuzzer", "mutate"]

ADDRESS_SPACE = 4 << 30
"""Bytes of address space of a long run; a header that makes a reader allocate what it claims ends it."""
SLOW_SECONDS = 5.0
"""A case that takes longer fails."""

_NUMBERS = (0, 1, -1, 2, 7, 127, 128, 2**31, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1.5, 1e308, -0.0)
_VALUES: tuple[Any, ...] = (None, True, False, "", "F16", "x" * 300, "\u0000", "é", [], {}, [[]], {"a": 1}, *_NUMBERS)
_TOKENS = (
    b"{",
    b"}",
    b"[",
    b"]",
    b'"',
    b",",
    b":",
    b"\\",
    b"\\u0000",
    b"\xff",
    b"\x00",
    b"1e999",
    b"NaN",
    b"-0",
    b"9" * 25,
)


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change JSON text, as text or as a value, once or a few times."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = _mutate_value(rng, data) if rng.random() < 0.6 else _mutate_bytes(rng, data)
    return data


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    text = bytearray(data)
    place = rng.randrange(len(text) + 1)
    span = rng.choice((0, 1, 1, 2, 8, 64))
    kind = rng.randrange(5)
    if kind == 0:
        text[place : place + span] = b""
    elif kind == 1:
        text[place:place] = rng.choice(_TOKENS)
    elif kind == 2 and text:
        text[place % len(text)] = rng.randrange(256)
    elif kind == 3:
        other = rng.randrange(len(text) + 1)
        text[place : place + span] = text[other : other + rng.choice((1, 8, 64, 512))]
    else:
        text[place:place] = rng.choice((b"[", b'{"a":')) * rng.choice((1, 70, 3000))
    return bytes(text)


def _mutate_value(rng: random.Random, data: bytes) -> bytes:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return _mutate_bytes(rng, data)
    places = _places(value)
    if not places:
        return _mutate_bytes(rng, data)
    holder, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice(("", "x", str(key) + "x", "__metadata__"))] = holder.pop(key)
    elif kind == 2 and isinstance(holder[key], int):
        holder[key] = holder[key] + rng.choice((-128, -16, -1, 1, 16, 128, 2**40))
    elif kind == 3:
        other, name = rng.choice(places)
        holder[key] = json.loads(json.dumps(other[name]))
    else:
        holder[key] = rng.choice(_VALUES)
    return json.dumps(value).encode()


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict):
            found += [(part, key) for key in part]
            pending += part.values()
        elif isinstance(part, list):
            found += [(part, index) for index in range(len(part))]
            pending += part
    return found


class Fuzzer:
    """Sound checkpoints in three containers, and mutated ones beside them.

    Args:
        folder: where they are written.
        read: what is done with a mutated checkpoint; default: everything that trellis-format can do with it.
    """

    def __init__(self, folder: Path, *, read: Callable[[Path], object] | None = None) -> None:
        rng = np.random.default_rng(0)
        tensors = random_layer(rng, experts=2, hidden=128, intermediate=128, bits=3, bias=None)
        tensors["norm.weight"] = np.ones(8, np.float16)
        config = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2, "hidden_act": "silu"}
        stated = {"quant_method": "exl3", "codebook": "mcg", "bits": 3.0}
        storage = {
            name.removesuffix(".trellis"): {"bits_per_weight": 3} for name in tensors if name.endswith("trellis")
        }
        source = write_checkpoint(
            folder / "exl3",
            tensors,
            config=config | {"quantization_config": stated},
            quantization=stated | {"tensor_storage": storage},
            shards=2,
            index=True,
        )
        self._folders = {"exl3": source}
        for target in ("exl3-v1", "native"):
            self._folders[target] = folder / target
            with closing(open_source(source)) as opened:
                convert(opened, folder / target, target)
        self._cases: list[tuple[str, Path, Callable[[Path], object]]] = []
        for container, path in self._folders.items():
            work = folder / f"mutated-{container}"
            shutil.copytree(path, work)
            own = {"exl3": _read_exl3, "exl3-v1": _read_container, "native": _read_native}[container]
            self._cases += [(container, file, read or own) for file in sorted(work.iterdir())]

    def run(self, seed: int) -> None:
        """Mutate one file by a seed and read its checkpoint; what is not a `FormatError` passes through."""
        rng = random.Random(seed)
        container, file, read = rng.choice(self._cases)
        sound = (self._folders[container] / file.name).read_bytes()
        file.write_bytes(self._mutated(rng, file, sound))
        try:
            read(file.parent)
        except FormatError:
            pass
        finally:
            file.write_bytes(sound)

    @staticmethod
    def _mutated(rng: random.Random, file: Path, sound: bytes) -> bytes:
        if file.suffix != ".safetensors":
            return mutate(rng, sound)
        length = int.from_bytes(sound[:8], "little")
        header, data = mutate(rng, sound[8 : 8 + length]), sound[8 + length :]
        claimed = len(header)
        if rng.random() < 0.05:
            claimed = rng.choice((0, 1, 7, claimed + 1, claimed - 1, 2**31, 2**63, 2**64 - 1, 100_000_001))
        if rng.random() < 0.05:
            data = data[: rng.randrange(len(data) + 1)]
        return (claimed % 2**64).to_bytes(8, "little") + header + data


def _read_exl3(path: Path) -> None:
    validate_checkpoint(path, data=True)
    with closing(open_source(path)) as source:
        plan_conversion(source, "native")


def _read_container(path: Path) -> None:
    validate_checkpoint(path, data=True)
    manifest = read_container_manifest(path)
    for layer in manifest.geometry.moe_layer_indices:
        trellis_from_container(read_container_layer(path, manifest, layer, verify=False))
    _plan(path)


def _read_native(path: Path) -> None:
    validate_checkpoint(path, data=True)
    manifest = read_native_manifest(path)
    for layer in manifest.indices:
        trellis_from_native(read_native_layer(path, manifest, layer, verify=False))
    _plan(path)


def _plan(path: Path) -> None:
    with closing(open_source(path)) as source:
        plan_conversion(source, "exl3")


def main(arguments: list[str] | None = None) -> int:
    """Run many cases; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=200_000, help="cases to run (default: 200,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first case (default: 0)")
    parser.add_argument("--only", type=int, help="run the case of this seed alone")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    seeds = [options.only] if options.only is not None else range(options.seed, options.seed + options.count)
    failed: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        for number, seed in enumerate(seeds, start=1):
            started = time.perf_counter()
            try:
                fuzzer.run(seed)
            except Exception:  # noqa: BLE001  # whatever it is, it is what this run looks for
                failed.append(seed)
                print(f"seed {seed} failed:\n{traceback.format_exc()}", flush=True)
            if time.perf_counter() - started > SLOW_SECONDS:
                failed.append(seed)
                print(f"seed {seed} took {time.perf_counter() - started:.1f} s", flush=True)
            if number % 10_000 == 0:
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                print(f"{number} cases, {len(failed)} failed, peak memory {peak / 1024:.0f} MiB", flush=True)
    print(f"{len(seeds)} cases, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
