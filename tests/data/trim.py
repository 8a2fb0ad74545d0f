"""Owns the derivation of this folder from the full set of outputs and checkpoints.  It must not compute any of them.

    python tests/data/trim.py DIR [--out OUT]

DIR holds `golden/` and `checkpoints/` in full; OUT defaults to the folder of this script.  What is kept, and why, is
told in README.md beside it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

WHOLE = "tiny_3_mul1"
LARGE = (".layer1.m40.", ".layer1.m8.")
"""Cases of the whole checkpoint that are left out: layer 0 has the same batches."""
LEFT_OUT = ("linear.mul1.k5.", "linear.mul1.k2.256x128.", "linear.mcg.")
"""Linears that are left out: others or layers have their codebook, and their rates are among the random tiles."""
TILE_ROWS = 1
"""Rows of tiles that are kept of each random matrix, of 8: tiles are decoded alone."""
TOKENS = 8
"""Tokens that are kept of a batch of the whole checkpoint's expert layers."""
CUT_TOKENS = 3
"""Tokens that are kept of a batch of the other checkpoints."""
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Cut:
    """What is kept of one checkpoint: that many experts of each of those layers, and modules that match `also`."""

    checkpoint: str
    layers: tuple[int, ...]
    experts: int
    also: str = r"(?!)"


CUTS = (
    Cut("mixtral_3.3_mul1", (0,), 2),
    Cut("gptoss_3_mcg", (0,), 2),
    Cut("dsv3_3_mcg", (1,), 2, also=r"model\.layers\.1\.mlp\.shared_experts\."),
)
STORAGE = "quantization_config.json"
ROUTER = re.compile(r"model\.layers\.(\d+)\.(?:mlp\.gate|mlp\.router|block_sparse_moe\.gate)\.\w+")
EXPERT = re.compile(r"(model\.layers\.(\d+)\.\w+\.experts\.)(\d+)(\..+)")
COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")


def main() -> None:
    """Write the trimmed set."""
    parser = argparse.ArgumentParser(description="Derive the tracked test data from the full set.")
    parser.add_argument("source", type=Path, help="folder with golden/ and checkpoints/ in full")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    for part in ("golden", "checkpoints"):
        shutil.rmtree(options.out / part, ignore_errors=True)
        (options.out / part).mkdir(parents=True)
    trim_linear(options.source, options.out)
    moe = load_file(options.source / "golden/exl3_moe.safetensors")
    arch = load_file(options.source / "golden/exl3_arch.safetensors")
    shutil.copytree(options.source / "checkpoints" / WHOLE, options.out / "checkpoints" / WHOLE)
    whole = options.out / "checkpoints" / WHOLE / STORAGE
    write_storage(whole, json.loads(whole.read_text()))
    kept_moe = {
        name: array[:TOKENS] if ".layer" in name else array
        for name, array in moe.items()
        if name.startswith(f"{WHOLE}.") and not any(case in name for case in LARGE)
    }
    kept_arch: Arrays = {}
    for cut in CUTS:
        chosen = {layer: choose(cut, layer, moe | arch) for layer in cut.layers}
        trim_checkpoint(options.source / "checkpoints" / cut.checkpoint, options.out / "checkpoints", cut, chosen)
        for layer, experts in chosen.items():
            kept_moe |= filter_tokens(moe, f"{cut.checkpoint}.layer{layer}.", experts)
            kept_arch |= filter_tokens(arch, f"{cut.checkpoint}.layer{layer}.", experts)
    save_file(kept_moe, options.out / "golden/exl3_moe.safetensors")
    save_file(kept_arch, options.out / "golden/exl3_arch.safetensors")
    for path in options.out.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def trim_linear(source: Path, out: Path) -> None:
    """Keep what goes into each decode and the SHA-256 of what comes out; drop matrices that only a quantiser needs."""
    arrays = load_file(source / "golden/exl3_linear.safetensors")
    hashes, kept = {}, {}
    for name, array in arrays.items():
        if name.startswith("linear."):
            if not name.endswith((".weight", ".weight_q")) and not name.startswith(LEFT_OUT):
                kept[name] = array
        elif name.startswith("states.") and name.endswith(".trellis"):  # the same tiles as inner.mul1's
            if not np.array_equal(array, arrays[f"inner.mul1{name.removeprefix('states')}"]):
                kept[name] = np.ascontiguousarray(array[:TILE_ROWS])
        elif name.endswith(".trellis"):
            kept[name] = np.ascontiguousarray(array[:TILE_ROWS])
        else:  # inner.<codebook>.k<K>.weight has 16 rows of weights for one of tiles, states.k<K> one
            rows = TILE_ROWS * (16 if name.startswith("inner.") else 1)
            hashes[name] = hashlib.sha256(np.ascontiguousarray(array[:rows]).tobytes()).hexdigest()
    save_file(kept, out / "golden/exl3_linear.safetensors")
    write_json(out / "golden/hashes.json", dict(sorted(hashes.items())))


def choose(cut: Cut, layer: int, golden: Arrays) -> tuple[int, ...]:
    """The experts of one layer whose routes keep most tokens; the lowest ones where several sets keep as many."""
    stem = f"{cut.checkpoint}.layer{layer}."
    ids = np.concatenate(
        [array for name, array in golden.items() if name.startswith(stem) and name.endswith(".topk_ids")]
    )
    everyone = range(int(ids.max()) + 1)
    return max(itertools.combinations(everyone, cut.experts), key=lambda some: np.isin(ids, some).all(axis=1).sum())


def filter_tokens(golden: Arrays, stem: str, experts: tuple[int, ...]) -> Arrays:
    """The first rows whose routes all go to `experts`, with their ids renumbered."""
    kept: Arrays = {}
    for name, ids in golden.items():
        if not (name.startswith(stem) and name.endswith(".topk_ids")):
            continue
        rows = np.flatnonzero(np.isin(ids, experts).all(axis=1))[:CUT_TOKENS]
        case = name.removesuffix("topk_ids")
        if rows.size:
            kept |= {other: array[rows] for other, array in golden.items() if other.startswith(case)}
            kept[name] = np.searchsorted(np.array(experts), ids[rows])
    return kept


def trim_checkpoint(source: Path, out: Path, cut: Cut, chosen: dict[int, tuple[int, ...]]) -> None:
    """Write a checkpoint of the chosen experts, renumbered from 0, their routers' rows, and the other kept modules."""
    folder = out / cut.checkpoint
    folder.mkdir()
    arrays = {}
    for name, array in load_file(source / "model.safetensors").items():
        new_name, rows = place(name, cut, chosen)
        if new_name is not None:
            arrays[new_name] = array if rows is None else np.ascontiguousarray(array[list(rows)])
    save_file(arrays, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {key: cut.experts for key in COUNT_KEYS if key in config}
    config["num_hidden_layers"] = max(cut.layers) + 1
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: config["num_hidden_layers"]]
    write_json(folder / "config.json", config)
    quantization = json.loads((source / STORAGE).read_text())
    storage = {}
    for module, value in quantization["tensor_storage"].items():
        tensors = {}
        for name, stored in value["stored_tensors"].items():
            new_name, _ = place(name, cut, chosen)
            if new_name is not None:
                tensors[new_name] = stored | {"shape": list(arrays[new_name].shape), "n_bytes": arrays[new_name].nbytes}
        if tensors:
            new_module, _ = place(f"{module}.x", cut, chosen)
            storage[(new_module or module).removesuffix(".x")] = value | {"stored_tensors": tensors}
    write_storage(folder / STORAGE, quantization | {"tensor_storage": storage})


def place(name: str, cut: Cut, chosen: dict[int, tuple[int, ...]]) -> tuple[str | None, tuple[int, ...] | None]:
    """What a tensor is called in the trimmed checkpoint (None: dropped), and which rows are kept (None: all)."""
    if (match := EXPERT.fullmatch(name)) is not None:
        experts = chosen.get(int(match[2]), ())
        if int(match[3]) not in experts:
            return None, None
        return f"{match[1]}{experts.index(int(match[3]))}{match[4]}", None
    if (match := ROUTER.fullmatch(name)) is not None and int(match[1]) in chosen:
        return name, chosen[int(match[1])]
    return (name, None) if re.match(cut.also, name) else (None, None)


def write_storage(path: Path, value: object) -> None:
    """Write JSON without a space: the converter indents it, which is more than half of the file."""
    path.write_text(json.dumps(value, separators=(",", ":")) + "\n")


def write_json(path: Path, value: object) -> None:
    """Write indented JSON with a newline at the end."""
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    main()
