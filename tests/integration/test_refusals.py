"""Holds `trellis-moe run` to refusing what is unsound: code 2, one line that says what and where, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import exl3_files
from exl3_files import Raw, expert_name
from integration.commands import Outcome, listing, run_here, run_process

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 3, 128, 384, 4
GATE, UP, DOWN = (expert_name(0, 1, word) for word in ("gate_proj", "up_proj", "down_proj"))
CONFIG = {"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": EXPERTS, "hidden_size": HIDDEN}
INDEX = "model.safetensors.index.json"


@dataclass
class Case:
    """Everything that a run reads, sound until a test spoils it."""

    folder: Path
    tensors: dict[str, Any]
    inputs: dict[str, Any]
    config: Any = field(default_factory=lambda: dict(CONFIG))
    index: bool = False
    shards: int = 1
    options: list[str] = field(default_factory=list)
    after: list[Callable[[], object]] = field(default_factory=list)

    @property
    def model(self) -> Path:
        """The checkpoint's directory."""
        return self.folder / "model"

    @property
    def input(self) -> Path:
        """The input file."""
        return self.folder / "in.safetensors"

    @property
    def output(self) -> Path:
        """The output file."""
        return self.folder / "y.safetensors"

    def arguments(self) -> list[str]:
        """Write all files and give the arguments of the command; options given later override."""
        exl3_files.write_checkpoint(self.model, self.tensors, config=self.config, index=self.index, shards=self.shards)
        exl3_files.write_shard(self.input, self.inputs)
        for change in self.after:
            change()
        files = ("--checkpoint", self.model, "--input", self.input, "--output", self.output)
        return ["run", *map(str, files), "--layer", "0", "--device", "cpu", "--json", *self.options]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    rng = np.random.default_rng(0)
    tensors = exl3_files.random_layer(
        rng, experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, codebook="mul1", bits=2.5
    )
    inputs = {
        "x": rng.normal(size=(TOKENS, HIDDEN)).astype(np.float16),
        "topk_ids": np.array([[0, 1], [2, 2], [1, -1], [-1, -1]]),
        "topk_weights": rng.uniform(0.1, 1.0, (TOKENS, 2)).astype(np.float32),
    }
    return Case(tmp_path, tensors, inputs)


def put(name: str, value: Any) -> Callable[[Case], None]:
    return lambda case: case.tensors.update({name: value})


def drop(*names: str) -> Callable[[Case], None]:
    return lambda case: [case.tensors.pop(name) for name in names]  # type: ignore[func-returns-value]


def feed(**inputs: Any) -> Callable[[Case], None]:
    return lambda case: case.inputs.update(inputs)


def state(**config: Any) -> Callable[[Case], None]:
    return lambda case: case.config.update(config)


def give(*options: str) -> Callable[[Case], None]:
    return lambda case: case.options.extend(option.replace("{folder}", str(case.folder)) for option in options)


def then(change: Callable[[Case], object]) -> Callable[[Case], None]:
    return lambda case: case.after.append(lambda: change(case))


def cut(path: Path, length: int) -> None:
    path.write_bytes(path.read_bytes()[:length])


def set_value(name: str, index: int, value: float) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.tensors[name] = case.tensors[name].copy()
        case.tensors[name][index] = value

    return change


def set_weight(value: float) -> Callable[[Case], None]:
    return lambda case: case.inputs["topk_weights"].__setitem__((2, 1), value)


def set_id(value: int) -> Callable[[Case], None]:
    return lambda case: case.inputs["topk_ids"].__setitem__((2, 1), value)


def rename(old: str, new: str) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.tensors = {name.replace(old, new): tensor for name, tensor in case.tensors.items()}

    return change


def without_experts(case: Case) -> None:
    case.tensors = {"model.norm.weight": np.ones(HIDDEN, np.float16)}


def mixed_codebooks(case: Case) -> None:
    rng = np.random.default_rng(1)
    case.tensors = exl3_files.random_layer(rng, experts=EXPERTS, intermediate=INTERMEDIATE, codebook="mul1")
    case.tensors |= exl3_files.random_linear(rng, UP, HIDDEN, INTERMEDIATE, codebook="mcg")
    case.tensors.pop(f"{UP}.mul1")


def half_rate_of_mcg(case: Case) -> None:
    for name in [name for name in case.tensors if name.endswith(".mul1")]:
        case.tensors[name.replace(".mul1", ".mcg")] = np.array(exl3_files.MARKERS["mcg"], np.uint32)
        del case.tensors[name]


def large_bias(case: Case) -> None:
    bias = np.zeros(HIDDEN, np.float32)
    bias[3] = 1e6  # beyond float16
    for expert in range(EXPERTS):
        case.tensors[f"{expert_name(0, expert, 'down_proj')}.bias"] = bias


def stale_index(case: Case) -> None:
    path = case.model / INDEX
    index = json.loads(path.read_text())
    index["weight_map"][f"{GATE}.gone"] = index["weight_map"].pop(f"{GATE}.suh")
    path.write_text(json.dumps(index))


def with_index(*changes: Callable[[Case], object], shards: int = 1) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        case.index, case.shards = True, shards
        for each in changes:
            then(each)(case)

    return change


TRELLIS = np.zeros((HIDDEN // 16, INTERMEDIATE // 16, 41), np.int16)
MARKER = np.array(0x83DCD12D, np.uint32)
WRONG_MARKER = np.asarray(MARKER + 2, MARKER.dtype)
SHARD = "model/model.safetensors"
REFUSED: dict[str, tuple[Callable[[Case], object], tuple[str, ...]]] = {
    # the checkpoint's directory
    "missing directory": (give("--checkpoint", "{folder}/gone"), ("{folder}/gone: no such checkpoint directory",)),
    "not a directory": (give("--checkpoint", "{folder}/in.safetensors"), ("in.safetensors: a checkpoint is a dir",)),
    "no shards": (then(lambda case: (case.folder / SHARD).unlink()), ("{folder}/model: no *.safetensors file",)),
    "truncated shard": (then(lambda case: cut(case.folder / SHARD, 30_000)), (f"{{folder}}/{SHARD}", "truncated",
                                                                             "the file has 30000")),
    "truncated header": (then(lambda case: cut(case.folder / SHARD, 100)), (f"{{folder}}/{SHARD}", "truncated", "100")),
    "empty shard": (then(lambda case: cut(case.folder / SHARD, 0)), (f"{{folder}}/{SHARD}", "0 bytes")),
    "missing shard": (with_index(lambda case: (case.model / "model-00002-of-00002.safetensors").unlink(), shards=2),
                      (INDEX, "1 shards", "model-00002-of-00002.safetensors")),
    "stale index": (with_index(stale_index), (INDEX, "1 tensors", f"{GATE}.gone", f"{GATE}.suh")),
    "corrupt index": (with_index(lambda case: cut(case.model / INDEX, 20)), (INDEX, "not JSON")),
    "corrupt config": (then(lambda case: cut(case.model / "config.json", 9)), ("/model/config.json: not JSON",)),
    "config is a list": (lambda case: setattr(case, "config", []), ("config.json: must hold a JSON object", "list")),
    "config of wrong type": (state(hidden_size="128"), ("config.json: hidden_size", "'128'")),
    # linears
    "both markers": (put(f"{UP}.mcg", MARKER), (f"{{folder}}/{SHARD}", UP, "mcg and mul1", "at most one")),
    "wrong multiplier": (put(f"{UP}.mul1", WRONG_MARKER), (f"{SHARD}: {UP}.mul1", "0x83DCD12F", "0x83DCD12D")),
    "marker of a vector": (put(f"{UP}.mul1", MARKER.reshape(1)), (f"{UP}.mul1", "scalar", "[1]")),
    "width": (put(f"{UP}.trellis", TRELLIS), (f"{SHARD}: {UP}.trellis", "41", "16*K")),
    "half rate": (half_rate_of_mcg, (SHARD, ".trellis", "2.5", "mcg")),
    "short suh": (put(f"{GATE}.suh", np.ones(127, np.float16)), (f"{SHARD}: {GATE}.suh", "[127]", "128")),
    "short svh": (put(f"{DOWN}.svh", np.ones(64, np.float16)), (f"{SHARD}: {DOWN}.svh", "[64]", "128")),
    "one bias": (put(f"{DOWN}.bias", np.zeros(HIDDEN, np.float16)), (f"{SHARD}: {DOWN}.bias", "expert 1", "expert 0")),
    "no suh": (drop(f"{GATE}.suh"), (f"{SHARD}: {GATE}.suh", "missing", "128")),
    "suh of float32": (put(f"{GATE}.suh", np.ones(128, np.float32)), (f"{GATE}.suh", "F16", "F32")),
    "trellis of uint16": (put(f"{GATE}.trellis", TRELLIS.view(np.uint16)), (f"{GATE}.trellis", "I16", "U16")),
    "flat trellis": (put(f"{GATE}.trellis", TRELLIS[0]), (f"{GATE}.trellis", "3-D", "[24, 41]")),
    "NaN scale": (set_value(f"{GATE}.svh", 5, np.nan), (f"{SHARD}: {GATE}.svh", "nan at index 5", "finite")),
    "inf scale": (set_value(f"{DOWN}.suh", 7, -np.inf), (f"{SHARD}: {DOWN}.suh", "-inf at index 7", "finite")),
    "large bias": (large_bias, (f"{SHARD}: model.layers.0.mlp.experts.0.down_proj.bias", "inf at index 3", "finite")),
    # layers
    "no experts": (without_experts, ("{folder}/model", "layer 0 has no experts")),
    "other layer": (give("--layer", "7"), ("{folder}/model", "layer 7 has no experts", "layers with experts: 0")),
    "negative layer": (give("--layer", "-1"), ("{folder}/model", "layer -1 has no experts")),
    "missing expert": (rename("experts.1.", "experts.9."), ("{folder}/model", "expert 1 has no gate", "of 10 experts")),
    "expert count": (state(num_experts=4), ("expert 3 has no gate", "3 of 4", "config.json declares 4")),
    "missing projection": (drop(f"{UP}.trellis", f"{UP}.suh", f"{UP}.svh", f"{UP}.mul1"),
                           ("expert 1 has no up", "2 of 3")),
    "mixed codebooks": (mixed_codebooks, ("mixes codebooks", "mul1: ", f"mcg: {UP}")),
    "unknown activation": (state(hidden_act="tanhexp"), ("config.json", "'tanhexp'", "--activation")),
    "limit beyond float32": (state(swiglu_limit=1e300), ("limit 1e+300", "beyond float32")),
    "no config": (then(lambda case: (case.model / "config.json").unlink()),
                  ("{folder}/model: there is no config.json", "--activation")),
    "gate not wanted": (give("--activation", "relu2"),
                        ("{folder}/model: layer 0", "relu2 takes no gate", "have a gate", "--activation must be silu")),
    "NUL": (give("--checkpoint", "a\0b"), (r"a\x00b", "cannot hold a NUL", "index 1")),
    "other method": (state(quantization_config={"quant_method": "awq"}), ("config.json", "'awq'", "'exl3'")),
    # the input
    "missing input": (give("--input", "{folder}/gone"), ("{folder}/gone",)),
    "input is a directory": (give("--input", "{folder}/model"), ("{folder}/model", "not a regular file")),
    "truncated input": (then(lambda case: cut(case.input, 900)), ("{folder}/in.safetensors", "truncated", "900")),
    "no input tensor": (lambda case: case.inputs.pop("topk_ids"), ("in.safetensors: topk_ids: missing",)),
    "id of no expert": (set_id(3), ("in.safetensors: topk_ids: id 3 at token 2, slot 1", "has 3 (0..2")),
    "id below -1": (set_id(-2), ("in.safetensors: topk_ids: id -2 at token 2, slot 1", "-1 for none")),
    "NaN weight": (set_weight(np.nan), ("in.safetensors: topk_weights: nan at token 2, slot 1", "finite")),
    "inf weight": (set_weight(np.inf), ("in.safetensors: topk_weights: inf at token 2, slot 1", "finite")),
    "wide x": (feed(x=np.zeros((TOKENS, 256), np.float16)), ("in.safetensors: x: has 256 channels", "takes 128")),
    "x of float64": (feed(x=np.zeros((TOKENS, HIDDEN))), ("in.safetensors: x:", "F16 or BF16 or F32", "F64")),
    "x of float8": (feed(x=Raw("F8_E4M3", (TOKENS, HIDDEN), bytes(TOKENS * HIDDEN))), ("in.safetensors: x", "F8_E4M3")),
    "ids of int16": (feed(topk_ids=np.zeros((TOKENS, 2), np.int16)), ("topk_ids:", "I32 or I64", "I16")),
    "weights of int": (feed(topk_weights=np.ones((TOKENS, 2), np.int32)), ("topk_weights:", "I32")),
    "few ids": (feed(topk_ids=np.zeros((3, 2), np.int64)), ("in.safetensors: topk_ids [3, 2]", "4 tokens")),
    # arguments
    "rank": (give("--tp-rank", "2", "--tp-size", "2"), ("rank 2", "0..1")),
    "ranks": (give("--tp-rank", "0", "--tp-size", "4"), ("4 ranks", "384 channels", "1 to 3")),
    "no ranks": (give("--tp-rank", "0", "--tp-size", "0"), ("0 ranks", "1 to 3")),
    "half a share": (give("--tp-rank", "0"), ("--tp-rank", "--tp-size")),
    "pattern": (give("--pattern", "(?P<layer>"), ("'(?P<layer>'", "not a regular expression")),
    "pattern without groups": (give("--pattern", ".*"), ("'.*'", "lacks the groups")),
    "pattern out of reach": (give("--pattern", "a{99999999999999999999}"), ("not a regular expression",)),
    "pattern of optional groups": (give("--pattern", "(?:(?P<layer>x)|.*)(?P<expert>y)?(?P<projection>z)?"),
                                   ("layer 0 has no experts",)),
    "unknown word of a pattern": (give("--pattern", r".*\.(?P<layer>\d+)\.mlp\.(?P<projection>\w+)\.(?P<expert>\d+).*"),
                                  ("'experts' is not known", "gate_proj")),
    "activation": (give("--activation", "tanhexp"), ("tanhexp", "silu")),
    "long name": (give("--checkpoint", "a" * 300), ("a" * 300, "File name too long")),
    # the output
    "no output directory": (give("--output", "{folder}/gone/y"), ("{folder}/gone/y", "does not exist")),
    "output is a directory": (give("--output", "{folder}"), ("{folder}", "this is a directory")),
    "output is the input": (give("--output", "{folder}/in.safetensors"), ("in.safetensors", "must not be the input")),
    "output is a shard": (give("--output", f"{{folder}}/{SHARD}"), (SHARD, "must not be a file of the checkpoint")),
    "output is a device": (give("--output", os.devnull), (os.devnull, "regular file")),
}  # fmt: skip


def expect_refusal(case: Case, done: Outcome, before: dict[str, bytes | None], parts: tuple[str, ...]) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert done.err.startswith("trellis-moe")
    assert done.err.count("\n") == 1
    for part in parts:
        assert part.replace("{folder}", str(case.folder)) in done.err, done.err
    assert listing(case.folder) == before, "something was written"


def test_the_sound_case_runs(case: Case) -> None:
    done = run_here(*case.arguments())
    assert (done.code, done.err) == (0, "")
    y = load_file(case.output)["y"]
    assert torch.isfinite(y).all()
    assert y[:2].any()
    assert not y[3].any()


@pytest.mark.parametrize(("spoil", "parts"), REFUSED.values(), ids=REFUSED)
def test_what_is_unsound_is_refused(case: Case, spoil: Callable[[Case], object], parts: tuple[str, ...]) -> None:
    spoil(case)
    arguments = case.arguments()
    before = listing(case.folder)
    expect_refusal(case, run_here(*arguments), before, parts)


def test_a_process_ends_alike(case: Case) -> None:
    spoil, parts = REFUSED["both markers"]
    spoil(case)
    arguments = case.arguments()
    before = listing(case.folder)
    expect_refusal(case, run_process(*arguments), before, parts)


def test_a_gpu_that_is_not_there_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = case.arguments()
    before = listing(case.folder)
    expect_refusal(case, run_here(*arguments, "--device", "cuda"), before, ("--device cuda", "no CUDA device"))


def test_a_folder_that_cannot_be_written_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = case.folder / "closed"
    closed.mkdir(mode=0o500)
    case.options += ["--output", str(closed / "y")]
    arguments = case.arguments()
    before = listing(case.folder)
    if os.access(closed, os.W_OK):  # root may write anywhere
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed)
    expect_refusal(case, run_here(*arguments), before, (str(closed / "y"), "not writable"))


def test_names_from_files_cannot_drive_the_terminal(case: Case) -> None:
    rename("experts.1.gate_proj", "experts.1.\x1b[31m\ngate_proj")(case)
    rename("\x1b[31m\ngate_proj.suh", "\x1b[31m\ngate_proj.gone")(case)
    case.options += ["--pattern", r"(?s).*\.(?P<layer>\d+)\.mlp\.experts\.(?P<expert>\d+)\.[^gud]*(?P<projection>\w+)"]
    arguments = case.arguments()
    before = listing(case.folder)
    done = run_here(*arguments)
    expect_refusal(case, done, before, ("[31m", "gate_proj.suh", "missing"))
    assert "\x1b" not in done.err


def test_an_index_can_be_ignored(case: Case) -> None:
    with_index(stale_index)(case)
    done = run_here(*case.arguments(), "--ignore-index")
    assert (done.code, done.err) == (0, "")
    assert case.output.is_file()
