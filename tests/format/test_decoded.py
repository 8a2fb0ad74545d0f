"""Holds a decoded file to the codebook values and to the float64 reference, strip by strip."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from exl3_files import expert_name, random_layer, random_linear, write_checkpoint, write_shard
from trellis_format.codebooks import get_codebook
from trellis_format.convert import convert
from trellis_format.convert_source import open_source
from trellis_format.decoded import StoredLinear, plan_decoded
from trellis_format.errors import FormatUnsupportedError, FormatValueError
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.rates import Rate
from trellis_format.reference import reconstruct
from trellis_format.source import Projection
from trellis_format.tiles import decode_inner
from trellis_format.writer import write_shard as write_planned


def described(folder: Path, tensors: dict[str, Any]) -> Exl3Linear:
    reader = ShardReader(read_header(write_shard(folder / "in.safetensors", tensors)))
    arrays = {name.rpartition(".")[2]: FileArray(reader, entry) for name, entry in reader.header.entries.items()}
    return describe_linear("m", arrays)


def written(folder: Path, linear: Exl3Linear, **options: Any) -> dict[str, np.ndarray]:
    write_planned(folder / "out.safetensors", [plan_decoded(StoredLinear.of_exl3(linear), **options)])
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("bits", "codebook"), [(1, "3inst"), (3.5, "mul1"), (8, "mcg")])
def test_values_of_the_codebook_are_exact(tmp_path: Path, dtype: str, bits: float, codebook: str) -> None:
    tensors = dict(random_linear(np.random.default_rng(0), "m", 384, 256, bits=bits, codebook=codebook))
    linear = described(tmp_path, tensors)
    (found,) = written(tmp_path, linear, dtype=dtype).values()
    assert found.dtype == np.dtype(dtype)
    assert np.array_equal(found, decode_inner(tensors["m.trellis"], get_codebook(codebook), linear.rate))


@pytest.mark.parametrize("packed", [False, True])
def test_the_original_basis_is_the_reference_rounded_once(tmp_path: Path, packed: bool) -> None:
    tensors = dict(random_linear(np.random.default_rng(1), "m", 256, 384, bits=4, codebook="mcg", packed=packed))
    linear = described(tmp_path, tensors)
    suh, svh = linear.read_input_scale(), linear.read_output_scale()
    wanted = reconstruct(tensors["m.trellis"], suh, svh, "mcg", linear.rate)
    for dtype in (np.float16, np.float32):
        found = written(tmp_path, linear, dtype=np.dtype(dtype).name, original_basis=True)
        assert list(found) == ["m.weight"]
        assert np.array_equal(found["m.weight"], wanted.astype(dtype))
    assert list(written(tmp_path, linear)) == ["m.inner"]


@pytest.mark.parametrize("projection", Projection)
def test_a_linear_of_a_container_is_that_of_exl3(tmp_path: Path, projection: Projection) -> None:
    name = expert_name(0, 1, f"{projection}_proj")
    tensors = dict(random_layer(np.random.default_rng(2)))
    with closing(open_source(write_checkpoint(tmp_path / "exl3", tensors, config={}))) as source:
        convert(source, tmp_path / "native", "native")
    suh, svh = tensors[f"{name}.suh"], tensors[f"{name}.svh"]
    wanted = reconstruct(tensors[f"{name}.trellis"], suh, svh, "mcg", Rate.of(3))
    with closing(open_source(tmp_path / "native")) as source:
        linear = StoredLinear.of_layer(*source.read_layer(0), 1, projection, name)
        assert linear.shape == wanted.shape
        write_planned(tmp_path / "out.safetensors", [plan_decoded(linear, dtype="float32", original_basis=True)])
        assert np.array_equal(load_file(tmp_path / "out.safetensors")[f"{name}.weight"], wanted.astype(np.float32))
        turned = replace(linear, has_original_basis=False)
        assert plan_decoded(turned).name == f"{name}.inner"
        with pytest.raises(FormatUnsupportedError, match="intermediate Hadamard"):
            plan_decoded(turned, original_basis=True)


def test_a_weight_beyond_float16_is_not_written_as_infinite(tmp_path: Path) -> None:
    tensors = dict(random_linear(np.random.default_rng(1), "m", 128, 128))
    for suffix in ("suh", "svh"):
        tensors[f"m.{suffix}"] = np.full(128, 2000.0, np.float16)
    linear = described(tmp_path, tensors)
    with pytest.raises(FormatValueError, match=r"is beyond float16 \(largest 6\.55e\+04\); decode to float32"):
        written(tmp_path, linear, original_basis=True)
    assert not (tmp_path / "out.safetensors").exists()
    assert np.isfinite(written(tmp_path, linear, original_basis=True, dtype="float32")["m.weight"]).all()


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    tensors = dict(random_linear(np.random.default_rng(1), "m", 128, 128))
    tensors["m.suh"][5] = np.nan
    linear = described(tmp_path, tensors)
    with pytest.raises(FormatValueError, match="must be finite"):
        written(tmp_path, linear, original_basis=True)


def test_a_bias_is_read_from_either_container(tmp_path: Path) -> None:
    name = expert_name(0, 1, "down_proj")
    tensors = dict(random_layer(np.random.default_rng(4), bias=np.float16))
    wanted = tensors[f"{name}.bias"]
    with closing(open_source(write_checkpoint(tmp_path / "exl3", tensors, config={}))) as source:
        layer = StoredLinear.of_layer(*source.read_layer(0), 1, Projection.DOWN, name)
    alone = {f"m.{key.rpartition('.')[2]}": value for key, value in tensors.items() if key.startswith(f"{name}.")}
    for linear in (layer, StoredLinear.of_exl3(described(tmp_path, alone))):
        assert linear.bias is not None
        assert np.array_equal(linear.bias(), wanted)
    del alone["m.bias"]
    assert StoredLinear.of_exl3(described(tmp_path, alone)).bias is None
