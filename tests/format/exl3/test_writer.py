"""Holds what a written checkpoint states to its tensors, and a stopped one to being continued."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exl3_files import random_layer
from trellis_format.checkpoint import open_checkpoint
from trellis_format.errors import FormatValueError
from trellis_format.exl3.writer import quantization_object, tensor_storage, write_exl3
from trellis_format.inspect import inspect_checkpoint
from trellis_format.report import Severity
from trellis_format.writer import OutputDirectory, PlannedTensor, of_array

CONFIG = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}


def planned(bits: float = 3, codebook: str = "mcg") -> list[PlannedTensor]:
    rng = np.random.default_rng(0)
    tensors = random_layer(rng, bits=bits, codebook=codebook) | {"model.norm.weight": np.ones(128, np.float16)}
    return [of_array(name, tensor) for name, tensor in tensors.items()]  # type: ignore[arg-type]


@pytest.mark.parametrize(("bits", "codebook"), [(3, "mcg"), (2.5, "mul1"), (8, "3inst")])
def test_storage_states_rate_and_multiplier(bits: float, codebook: str) -> None:
    storage = tensor_storage(planned(bits, codebook))
    module = "model.layers.0.mlp.experts.1.down_proj"
    entry = storage[module]
    assert entry["bits_per_weight"] == bits
    assert isinstance(entry["bits_per_weight"], float) == (bits == 2.5)
    assert entry["quant_format"] == "exl3"
    multipliers = {"mcg": {"mcg_multiplier": 0xCBAC1FED}, "mul1": {"mul1_multiplier": 0x83DCD12D}, "3inst": {}}
    assert {key: value for key, value in entry.items() if key.endswith("multiplier")} == multipliers[codebook]
    stated = {"shape": [16, 8, int(16 * bits)], "n_bytes": 16 * 8 * int(32 * bits), "dtype": "torch.int16"}
    assert entry["stored_tensors"][f"{module}.trellis"] == stated
    assert storage["model.norm"] == {
        "stored_tensors": {"model.norm.weight": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"}}
    }


def test_the_object_states_the_average_rate() -> None:
    stated = quantization_object([*planned(3), *planned(8)], codebook="mcg", head_bits=6)
    assert (stated["quant_method"], stated["bits"], stated["codebook"], stated["head_bits"]) == ("exl3", 5.5, "mcg", 6)
    assert "head_bits" not in quantization_object([], codebook="mcg", head_bits=None)
    assert quantization_object([], codebook="mcg", head_bits=None)["bits"] == 0.0


@pytest.mark.parametrize("shards", [1, 3])
def test_a_written_checkpoint_agrees_with_itself(tmp_path: Path, shards: int) -> None:
    tensors, told = planned(), []
    stated = quantization_object(tensors, codebook="mcg", head_bits=None)
    with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        config = CONFIG | {"quantization_config": stated}
        write_exl3(directory, tensors, config=config, quantization=stated, shards=shards, on_bytes=told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors)
    report = inspect_checkpoint(tmp_path / "out")
    assert [finding for finding in report.findings if finding.severity is not Severity.NOTE] == []
    assert len(report.shards) == shards
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shards > 1)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert set(checkpoint.tensors) == {tensor.name for tensor in tensors}


def test_configurations_may_be_left_out(tmp_path: Path) -> None:
    with OutputDirectory(tmp_path / "out", fingerprint="f") as directory:
        write_exl3(directory, planned(), config=None, quantization=None)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    tensors = [*planned(), planned()[0]]
    with (
        pytest.raises(FormatValueError, match=f"{tensors[0].name}: two tensors of the checkpoint have this name"),
        OutputDirectory(tmp_path / "out", fingerprint="f") as directory,
    ):
        write_exl3(directory, tensors, config=None, quantization=None, shards=4)


def test_complete_shards_are_not_written_again(tmp_path: Path) -> None:
    tensors = planned()
    told: list[int] = []

    def stop(nbytes: int) -> None:
        if sum(told) > sum(tensor.nbytes for tensor in tensors) * 3 // 4:  # well into the second shard
            raise KeyboardInterrupt
        told.append(nbytes)

    with (
        pytest.raises(KeyboardInterrupt),
        OutputDirectory(tmp_path / "out", fingerprint="f", resumable=True) as partial,
    ):
        write_exl3(partial, tensors, config=None, quantization=None, shards=2, on_bytes=stop)
    assert [path.name for path in partial.partial.glob("*.safetensors")] == ["model-00001-of-00002.safetensors"]
    first = partial.file("model-00001-of-00002.safetensors").stat()
    told.clear()
    with OutputDirectory(tmp_path / "out", fingerprint="f", resumable=True) as directory:
        write_exl3(directory, tensors, config=None, quantization=None, shards=2, on_bytes=told.append)
    assert sum(told) == sum(tensor.nbytes for tensor in tensors)
    after = (tmp_path / "out" / "model-00001-of-00002.safetensors").stat()
    assert (after.st_ino, after.st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert len(json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]) == len(
        tensors
    )
