"""Owns hostile checkpoints: what a stranger may write, taken from the files to the layer's output.

It must not know which rule a case breaks.  Every case ends in an error of the packages' own, or in an output that
agrees with the float64 reference of what was read; the folder is as it was, memory and time are bounded.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks.record import Row
from exl3_files import random_layer, write_checkpoint, write_json
from fuzzing import Fuzzer
from trellis_format.activations import Activation
from trellis_format.errors import FormatError
from trellis_format.layer_source import open_layer_source
from trellis_format.reference import moe_forward
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_kernels.errors import KernelError
from trellis_moe import ActivationSpec, ExecutionCapacity, bind, plan_execution, plan_weights, prepare_weights
from trellis_moe.errors import MoeError
from trellis_prep import PrepError

__all__ = ["FAMILIES", "run_family", "run_layer"]

CASES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/hostile/cases.json").read_text())
"""The corpus."""
OWN = (FormatError, PrepError, KernelError, MoeError)
SLOW_SECONDS = 60.0
_BOUND = 1e-2  # relative L2 in float16, scales at its extremes included; what is wrong is off by all of it
_LOSSY = 5e-2  # where one channel is ten thousand times the others, a block's Hadamard leaves them few bits
_CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 128, "moe_intermediate_size": 256}
_INDEX = "model.safetensors.index.json"


class Silent(Exception):
    """A case that ended in no acceptable way."""


def run_layer(
    source: TrellisSource,
    weights: TrellisWeights,
    *,
    tokens: int = 2,
    top_k: int = 2,
    seed: int = 0,
    before: Callable[[], None] | None = None,
) -> str:
    """Prepare and run a layer on the CPU and compare with the float64 reference; the outcome in a word or two.

    With `before`, the truth is computed first, then that is called, then the layer is prepared.

    Raises:
        Silent: if the output is finite and wrong.
    """
    rng = np.random.default_rng(seed)
    geometry = source.geometry
    law = source.activation or Activation("silu" if geometry.gated else "relu2")
    x = (rng.standard_normal((tokens, geometry.hidden_size)) / 8).astype(np.float16)
    ids = rng.integers(-1, geometry.num_experts + 1, (tokens, top_k))  # ids that are no expert too
    factors = rng.uniform(0.1, 1, (tokens, top_k)).astype(np.float32)
    if before is not None:
        truth = moe_forward(source, weights, x, ids, factors, activation=law)
        before()
    weight_plan = plan_weights(source)
    plan = plan_execution(
        weight_plan,
        activation=ActivationSpec(nonlinearity=law, io_dtype="float16", output_dtype="float16"),
        capacity=ExecutionCapacity(max_tokens=max(tokens, 1), top_k=top_k),
    )
    prepared = prepare_weights(weight_plan, weights)
    binding = bind(plan, prepared, torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8))
    out = torch.full((tokens, geometry.hidden_size), float("nan"), dtype=torch.float16)
    binding.run(torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(factors), out=out)
    if before is None:  # only now, so that preparation is what meets a file first
        with np.errstate(all="ignore"):
            truth = moe_forward(source, weights, x, ids, factors, activation=law)
    found = out.numpy().astype(np.float64)
    if not np.isfinite(found).all():
        if np.isfinite(truth).all() and np.abs(truth).max(initial=0) < 1:
            raise Silent("not finite, where the truth is small")
        return "not finite, beyond float16"
    scale = np.linalg.norm(truth)
    distance = np.linalg.norm(found - truth)
    if distance > _LOSSY * scale + 1e-6:
        raise Silent(f"off by {distance / max(scale, 1e-300):.3g} of the truth")
    return "right" if distance <= _BOUND * scale + 1e-6 else "right to a twentieth, which is float16 under such scales"


def _take(path: Path, layer: int = 0, **options: Any) -> str:
    return run_layer(*open_layer_source(path, layer), **options)


def _layer(**changes: Any) -> dict[str, Any]:
    tensors: dict[str, Any] = random_layer(np.random.default_rng(0), **changes)
    for name, tensor in tensors.items():
        if name.endswith(("suh", "svh")):
            tensors[name] = (tensor / np.float16(8 if name.endswith("suh") else 1)).astype(np.float16)
    return tensors


def _written(folder: Path, tensors: dict[str, Any] | None = None, **options: Any) -> Path:
    return write_checkpoint(folder / "model", tensors or _layer(), **({"config": _CONFIG} | options))


Case = Callable[[Path, random.Random], str]


def _header(folder: Path, rng: random.Random) -> str:
    shard = _written(folder) / "model.safetensors"
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name.endswith((".trellis", ".suh", ".svh"))]
    header[rng.choice(names)] |= rng.choice(CASES["headers"])["entry"]
    text = json.dumps(header).encode()
    claimed = rng.choice(CASES["lengths"]) if rng.random() < 0.2 else len(text)
    shard.write_bytes(claimed.to_bytes(8, "little") + text + data[8 + length :])
    return _take(shard.parent)


def _path(folder: Path, rng: random.Random) -> str:
    model = _written(folder, index=True, shards=2)
    outside = folder / "outside.safetensors"
    first = sorted(model.glob("*.safetensors"))[0]
    outside.write_bytes(first.read_bytes())
    (model / "loop.safetensors").symlink_to("loop.safetensors")
    (model / "dangling.safetensors").symlink_to("nowhere")
    (model / "folder.safetensors").mkdir()
    os.mkfifo(model / "pipe.safetensors")
    for name in ("loop", "dangling", "folder", "pipe"):
        if rng.random() < 0.7:
            stray = model / f"{name}.safetensors"
            stray.rmdir() if stray.is_dir() and not stray.is_symlink() else stray.unlink()
    index = json.loads((model / _INDEX).read_text())
    name = rng.choice(sorted(index["weight_map"]))
    index["weight_map"][name] = rng.choice(CASES["weight_maps"])
    write_json(model / _INDEX, index)
    return _take(model)


def _scale(folder: Path, rng: random.Random) -> str:
    tensors = _layer(bias=np.float16 if rng.random() < 0.3 else None)
    for _ in range(rng.choice((1, 1, 5))):
        name = rng.choice([name for name in tensors if name.endswith(("suh", "svh", "bias"))])
        tensors[name] = tensors[name].copy()
        places = slice(None) if rng.random() < 0.1 else rng.randrange(tensors[name].size)
        tensors[name][places] = np.float16(rng.choice(CASES["scales"]))
    return _take(_written(folder, tensors))


def _metadata(folder: Path, rng: random.Random) -> str:
    tensors, config = _layer(codebook=rng.choice(("mcg", "mul1", "3inst"))), dict(_CONFIG)
    kind = rng.randrange(5)
    if kind == 0:
        config |= rng.choice(CASES["configs"])
    elif kind == 1:  # markers of other codebooks, and of none
        name = rng.choice([name for name in tensors if name.endswith(".trellis")]).removesuffix("trellis")
        tensors[name + rng.choice(("mcg", "mul1"))] = np.array(rng.choice((0xCBAC1FED, 0x83DCD12D, 1)), np.uint32).view(
            np.int32
        )
    elif kind == 2:
        del tensors[rng.choice(sorted(tensors))]
    elif kind == 3:  # two tensors change places
        first, second = rng.sample(sorted(tensors), 2)
        tensors[first], tensors[second] = tensors[second], tensors[first]
    else:
        name = rng.choice(sorted(tensors))
        tensors[rng.choice((name + ".0", name.replace("experts.1", "experts.7"), name.upper()))] = tensors[name]
    return _take(_written(folder, tensors, config=config))


def _swap(folder: Path, rng: random.Random) -> str:
    model = _written(folder)
    shard = model / "model.safetensors"
    source, weights = open_layer_source(model, 0)
    data, kind, cut = shard.read_bytes(), rng.randrange(6), rng.random()

    def change() -> None:
        if kind == 0:
            os.truncate(shard, int(cut * len(data)))
        elif kind == 1:
            other = folder / "other"
            other.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
            other.replace(shard)
        elif kind == 2:
            shard.unlink()
        elif kind == 3:
            with shard.open("ab") as stream:
                stream.write(b"more")
        elif kind == 4:
            shard.unlink()
            shard.mkdir()
        else:
            with shard.open("r+b") as stream:
                stream.seek(int(cut * len(data)))
                stream.write(bytes(len(data) - int(cut * len(data))))

    return run_layer(source, weights, before=change)


def _extremes(folder: Path, rng: random.Random) -> str:
    kind = rng.randrange(8)
    if kind == 0:  # as many experts as a model may plausibly have, and more
        tensors = _layer(experts=rng.choice((300, 1000)), intermediate=128, bits=1)
        return _take(_written(folder, tensors, config=_CONFIG | {"moe_intermediate_size": 128}))
    if kind == 1:
        tensors = {"model.norm.weight": np.ones(128, np.float16)}
        return _take(_written(folder, tensors))
    tokens, top_k = rng.choice(((0, 1), (1, 1), (1, 64), (3, 64), (0, 64), (33, 1)))
    experts = rng.choice((1, 2, 70))
    return _take(_written(folder, _layer(experts=experts, bits=2)), tokens=tokens, top_k=top_k)


def _mutants(folder: Path) -> Case:
    outcome = [""]

    def read(path: Path) -> None:
        outcome[0] = _take(path)

    fuzzer = Fuzzer(folder / "fuzz", read=read)

    def case(_: Path, rng: random.Random) -> str:
        outcome[0] = "refused"
        fuzzer.run(rng.randrange(1 << 40))
        return outcome[0]

    return case


FAMILIES: dict[str, tuple[str, Case | None]] = {
    "mutants": ("headers, manifests, indices and configurations mutated at random", None),
    "headers": ("sizes, offsets and dtypes that overflow or contradict", _header),
    "paths": ("an index that leaves the folder; links, pipes and folders as shards", _path),
    "scales": ("scales and biases of NaN, infinity, denormals and extremes", _scale),
    "metadata": ("metadata that is wrong but plausible; tensors missing, exchanged or doubled", _metadata),
    "swaps": ("a shard cut, replaced, removed or changed under an open reader", _swap),
    "extremes": ("no experts, one, very many; no token, one; 1 and 64 routes a token", _extremes),
}
"""What each family does, and its case; the word is that of the command line."""


def run_family(word: str, folder: Path, *, count: int, seed: int, address_space: int | None = None) -> Row:
    """Run cases of a family.

    Args:
        word: a key of `FAMILIES`.
        folder: an empty one.
        count: cases.
        seed: of the first; case i has seed + i.
        address_space: bytes that the process may map from now on, for good; None does not bound them.
    """
    attack, case = FAMILIES[word]
    chosen = _mutants(folder) if case is None else case
    if address_space is not None:
        resource.setrlimit(resource.RLIMIT_AS, (address_space, resource.getrlimit(resource.RLIMIT_AS)[1]))
    begin, outcomes = time.perf_counter(), Counter[str]()
    silent: list[str] = []
    for number in range(seed, seed + count):
        started = time.perf_counter()
        try:
            outcomes[_outcome(chosen, folder / str(number), random.Random(f"{word} {number}"))] += 1
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what this looks for
            silent.append(f"seed {number}: {type(error).__name__}: {error}"[:300])
        if time.perf_counter() - started > SLOW_SECONDS:
            silent.append(f"seed {number}: took {time.perf_counter() - started:.1f} s")
    command = f"python -m attacks hostile {word} --count {count} --seed {seed}"
    return Row.of(attack, seed, outcomes, time.perf_counter() - begin, command, silent)


def _outcome(case: Case, folder: Path, rng: random.Random) -> str:
    folder.mkdir()
    try:
        try:
            outcome = case(folder, rng)
        except OWN:
            outcome = "refused"
        written = (".tmp", ".partial")
        strays = [path.name for path in folder.rglob("*") if path.name.startswith(".") or path.suffix in written]
        if strays:
            raise Silent(f"wrote {', '.join(strays)}")
        return outcome
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
