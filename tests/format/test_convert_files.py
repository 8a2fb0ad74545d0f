"""Holds the files beside tensors to what each container lets them state, and to their way back."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exl3_files import random_layer, write_checkpoint
from trellis_format.convert import convert, plan_conversion
from trellis_format.convert_files import KEPT_NAMES, carried_files
from trellis_format.convert_source import open_source
from trellis_format.native.config import QUANT_METHOD

MODEL = {"hidden_size": 128, "moe_intermediate_size": 256, "num_experts": 2, "hidden_act": "silu"}
STATED = {"quant_method": "exl3", "bits": 3.0, "codebook": "mcg"}
CONFIG, MODULES = KEPT_NAMES


def made(folder: Path, config: dict[str, Any] | None) -> Path:
    tensors = random_layer(np.random.default_rng(0), bits=3, codebook="mcg")
    return write_checkpoint(folder, tensors, config=config, quantization=STATED)


def run(source: Path, out: Path, target: str) -> Path:
    with closing(open_source(source)) as opened:
        plan = plan_conversion(opened, target)
        convert(opened, out, target)
        shards_and_own = (".safetensors", "-manifest.json", "-names.json", ".index.json")
        copied = [path for path in out.iterdir() if not path.name.endswith(shards_and_own)]
        assert plan.file_bytes == sum(path.stat().st_size for path in copied)
    return out


def plain(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in KEPT_NAMES if (path / name).exists()}


@pytest.mark.parametrize(
    "config",
    [
        MODEL | {"quantization_config": STATED, "after": 1},
        {"text_config": MODEL | {"quantization_config": STATED}},
        MODEL,
        None,
    ],
)
@pytest.mark.parametrize("ways", [("native",), ("exl3-v1",), ("exl3-v1", "native"), ("native", "exl3-v1")])
def test_a_container_states_itself_and_the_way_back_restores(
    tmp_path: Path, config: dict[str, Any] | None, ways: tuple[str, ...]
) -> None:
    source = path = made(tmp_path / "source", config)
    if config is not None:  # of another layout than that which is written
        (source / CONFIG).write_text(json.dumps(config))
    for way in ways:
        path = run(path, tmp_path / way, way)
        assert not (path / MODULES).exists()
        assert (path / CONFIG).exists() == (config is not None)
        if config is None:
            continue
        stated = json.loads((path / CONFIG).read_text())
        quantization = stated.pop("quantization_config", None)
        if way == "native":
            manifest = json.loads((path / "trellis-manifest.json").read_text())
            assert quantization == manifest["quantization_config"]
            assert sorted(quantization) == sorted(["quant_method", QUANT_METHOD])
        else:
            assert quantization is None
        silent = {key: value for key, value in config.items() if key != "quantization_config"}
        assert stated == ({"text_config": MODEL} if "text_config" in config else silent)
    back = run(path, tmp_path / "back", "exl3")
    assert plain(back) == plain(source)
    assert not any(file.name.startswith("trellis-") for file in back.iterdir())


def test_an_edited_configuration_is_not_lost(tmp_path: Path) -> None:
    source = made(tmp_path / "source", MODEL | {"quantization_config": STATED})
    native = run(source, tmp_path / "native", "native")
    config = json.loads((native / CONFIG).read_text()) | {"num_experts_per_tok": 1}
    (native / CONFIG).write_text(json.dumps(config))
    back = run(native, tmp_path / "back", "exl3")
    expected = MODEL | {"num_experts_per_tok": 1, "quantization_config": STATED}
    assert json.loads((back / CONFIG).read_text()) == expected
    (native / CONFIG).unlink()
    back = run(native, tmp_path / "without", "exl3")
    assert list(plain(back)) == [MODULES]


def test_without_the_kept_files_nothing_is_stated(tmp_path: Path) -> None:
    source = made(tmp_path / "source", {"quantization_config": STATED})
    native = run(source, tmp_path / "native", "native")
    for name in KEPT_NAMES.values():
        (native / name).unlink()
    back = run(native, tmp_path / "back", "exl3")
    assert {name: json.loads(data) for name, data in plain(back).items()} == {CONFIG: {}}


@pytest.mark.parametrize("container", ["exl3", "native"])
def test_modules_that_are_left_out_are_not_stated(tmp_path: Path, container: str) -> None:
    name = MODULES if container == "exl3" else KEPT_NAMES[MODULES]
    (tmp_path / name).write_text(json.dumps({"a": 1, "tensor_storage": {"x.0.up": {}, "x.1.up": {}, "x.10": {}}}))
    carried = carried_files([tmp_path / name], container, "exl3", None, ["x.1"])
    assert list(carried) == [MODULES]
    written = carried[MODULES]
    assert isinstance(written, bytes)
    assert json.loads(written) == {"a": 1, "tensor_storage": {"x.0.up": {}, "x.10": {}}}


def test_exl3_to_exl3_copies(tmp_path: Path) -> None:
    files = [tmp_path / CONFIG, tmp_path / MODULES, tmp_path / "tokenizer.json"]
    assert carried_files(files, "exl3", "exl3", None) == {path.name: path for path in files}
