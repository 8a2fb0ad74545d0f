"""Holds one linear to its rules: each with the smallest set of tensors that breaks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exl3_files import MARKERS, Raw, random_linear, write_shard
from trellis_format.codebooks import EXL3_CODEBOOKS
from trellis_format.errors import FormatError, FormatTypeError, FormatValueError
from trellis_format.exl3.linear import LINEAR_SUFFIXES, Exl3Linear, describe_linear
from trellis_format.files.arrays import FileArray, ShardReader
from trellis_format.files.header import read_header
from trellis_format.rates import ALL_RATES, Rate

PAIRS = [(name, rate) for name, codebook in EXL3_CODEBOOKS.items() for rate in codebook.legal_rates]
Tensors = dict[str, Any]


def tensors_of(folder: Path, tensors: Tensors, name: str = "p") -> dict[str, FileArray]:
    reader = ShardReader(read_header(write_shard(folder / "x.safetensors", tensors)))
    return {entry.removeprefix(f"{name}."): FileArray(reader, value) for entry, value in reader.header.entries.items()}


def describe(folder: Path, tensors: Tensors) -> Exl3Linear:
    return describe_linear("p", tensors_of(folder, tensors))


def sound(**options: Any) -> Tensors:
    return random_linear(np.random.default_rng(0), "p", 256, 128, **options)


@pytest.mark.parametrize(("codebook", "rate"), PAIRS, ids=str)
def test_every_codebook_and_rate_is_described(tmp_path: Path, codebook: str, rate: Rate) -> None:
    tensors = sound(bits=rate.bits, codebook=codebook)
    linear = describe(tmp_path, tensors)
    assert (linear.name, linear.codebook.name, linear.rate, linear.k, linear.n) == ("p", codebook, rate, 256, 128)
    assert linear.nbytes == sum(np.asarray(array).nbytes for array in tensors.values())
    assert linear.trellis.nbytes == 256 * 128 * rate.half_bits // 16
    assert linear.file == str(tmp_path / "x.safetensors")
    linear.check_marker()
    assert np.array_equal(linear.read_input_scale(), tensors["p.suh"])
    assert np.array_equal(linear.read_output_scale(), tensors["p.svh"])
    assert linear.read_bias() is None


def test_packed_signs_are_expanded_least_significant_bit_first(tmp_path: Path) -> None:
    tensors = sound(packed=True)
    tensors["p.su"][:2] = [5, -32768]
    linear = describe(tmp_path, tensors)
    scale = linear.read_input_scale()
    assert scale.dtype == np.float16
    assert scale[:16].tolist() == [-1, 1, -1] + [1] * 13
    assert scale[16:32].tolist() == [1] * 15 + [-1]
    for name, word, read in (("su", tensors["p.su"], scale), ("sv", tensors["p.sv"], linear.read_output_scale())):
        expected = [-1.0 if int(value) >> bit & 1 else 1.0 for value in word for bit in range(16)]
        assert read.tolist() == expected, name


def test_packed_signs_on_one_side_alone(tmp_path: Path) -> None:
    tensors = sound()
    tensors["p.sv"] = np.zeros(8, np.int16)
    del tensors["p.svh"]
    linear = describe(tmp_path, tensors)
    assert linear.read_output_scale().tolist() == [1.0] * 128
    assert np.array_equal(linear.read_input_scale(), tensors["p.suh"])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_bias_comes_as_float16(tmp_path: Path, dtype: type) -> None:
    tensors = sound(bias=dtype)
    bias = describe(tmp_path, tensors).read_bias()
    assert bias is not None
    assert bias.dtype == np.float16
    assert np.array_equal(bias, tensors["p.bias"].astype(np.float16))


def test_legacy_scale_is_carried_and_not_judged(tmp_path: Path) -> None:
    linear = describe(tmp_path, sound() | {"p.scale": np.zeros((3, 3), np.float32)})
    assert "scale" in linear.tensors


def without(*suffixes: str) -> Tensors:
    return {name: value for name, value in sound().items() if name.rpartition(".")[2] not in suffixes}


def trellis(shape: tuple[int, ...], dtype: type = np.int16, codebook: str = "mcg") -> Tensors:
    rows, columns = ((*shape, 0, 0)[0] * 16, (*shape, 0, 0)[1] * 16)
    tensors = random_linear(np.random.default_rng(0), "p", rows // 16 * 16, columns // 16 * 16, codebook=codebook)
    return tensors | {"p.trellis": np.zeros(shape, dtype)}


MARKER = np.array(MARKERS["mcg"], np.uint32)
VALUE, TYPE = FormatValueError, FormatTypeError
BROKEN: dict[str, tuple[Tensors, type[FormatError], tuple[str, ...]]] = {
    "trellis is 2-D": (trellis((16, 48)), VALUE, ("trellis", "embedding", "[16, 48]", "3-D")),
    "trellis is 1-D": (sound() | {"p.trellis": np.zeros(48, np.int16)}, VALUE, ("trellis", "[48]", "3-D")),
    "trellis is 4-D": (trellis((16, 8, 1, 48)), VALUE, ("trellis", "[16, 8, 1, 48]", "3-D")),
    "trellis is a scalar": (sound() | {"p.trellis": np.int16(1)}, VALUE, ("trellis", "[]", "3-D")),
    "trellis is float16": (trellis((16, 8, 48), np.float16), TYPE, ("int16", "F16")),
    "trellis is uint16": (trellis((16, 8, 48), np.uint16), TYPE, ("int16", "U16")),
    "trellis is bfloat16": (
        sound() | {"p.trellis": Raw("BF16", (16, 8, 48), bytes(2 * 16 * 8 * 48))}, TYPE, ("int16", "BF16"),
    ),
    "width 0": (trellis((16, 8, 0)), VALUE, ("bitrate", "width 0", "16, 24, 32, 40")),
    "width 47": (trellis((16, 8, 47)), VALUE, ("bitrate", "width 47", "16, 24, 32, 40")),
    "width 72, K = 4.5": (trellis((16, 8, 72), codebook="mul1"), VALUE, ("bitrate", "width 72")),
    "width 144, K = 9": (trellis((16, 8, 144)), VALUE, ("bitrate", "width 144", "128")),
    "half rate with mcg": (trellis((16, 8, 40)), VALUE, ("half rate", "mul1", "2.5")),
    "half rate without a marker": (trellis((16, 8, 24), codebook="3inst"), VALUE, ("half rate", "mul1", "1.5")),
    "k is no multiple of 128": (trellis((15, 8, 48)), VALUE, ("128", "240 x 128", "nearest: 256 x 128")),
    "n is no multiple of 128": (trellis((16, 9, 48)), VALUE, ("128", "256 x 144", "nearest: 256 x 256")),
    "no input channels": (trellis((0, 8, 48)), VALUE, ("128", "0 x 128", "nearest: 128 x 128")),
    "suh is missing": (without("suh"), VALUE, ("p.suh", "suh of 256 values")),
    "svh is missing": (without("svh"), VALUE, ("p.svh", "svh of 128 values")),
    "suh is short": (sound() | {"p.suh": np.ones(255, np.float16)}, VALUE, ("p.suh", "[255]", "256")),
    "svh is long": (sound() | {"p.svh": np.ones(256, np.float16)}, VALUE, ("p.svh", "[256]", "128")),
    "suh is a matrix": (sound() | {"p.suh": np.ones((256, 1), np.float16)}, VALUE, ("p.suh", "[256, 1]")),
    "suh is float32": (sound() | {"p.suh": np.ones(256, np.float32)}, TYPE, ("p.suh", "float16", "F32")),
    "svh is bfloat16": (
        sound() | {"p.svh": Raw("BF16", (128,), bytes(256))}, TYPE, ("p.svh", "float16", "BF16"),
    ),
    "su is short": (
        without("suh") | {"p.su": np.ones(15, np.int16)}, VALUE, ("p.su", "[15]", "16"),
    ),
    "su is float16": (without("suh") | {"p.su": np.ones(16, np.float16)}, TYPE, ("p.su", "int16", "F16")),
    "suh and su": (sound() | {"p.su": np.ones(16, np.int16)}, VALUE, ("suh", "su", "both")),
    "svh and sv": (sound() | {"p.sv": np.ones(8, np.int16)}, VALUE, ("svh", "sv", "both")),
    "both markers": (sound() | {"p.mul1": MARKER.view(np.int32)}, VALUE, ("mcg", "mul1", "both")),
    "marker is a vector": (
        sound() | {"p.mcg": MARKER.view(np.int32)[None]}, TYPE, ("p.mcg", "scalar", "I32", "[1]"),
    ),
    "marker is int64": (sound() | {"p.mcg": MARKER.astype(np.int64)}, TYPE, ("p.mcg", "scalar", "I64", "[]")),
    "marker is float32": (sound() | {"p.mcg": np.float32(1)}, TYPE, ("p.mcg", "scalar", "F32")),
    "bias is int16": (sound() | {"p.bias": np.ones(128, np.int16)}, TYPE, ("p.bias", "float16", "float32", "I16")),
    "bias is short": (sound() | {"p.bias": np.ones(127, np.float16)}, VALUE, ("p.bias", "[127]", "128")),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_each_rule_of_the_headers(tmp_path: Path, case: str) -> None:
    tensors, kind, words = BROKEN[case]
    arrays = tensors_of(tmp_path, tensors)
    with pytest.raises(kind) as caught:
        describe_linear("p", arrays)
    text = str(caught.value)
    assert [word for word in words if word not in text] == []
    assert text.startswith(str(tmp_path / "x.safetensors"))
    assert (caught.value.tensor or "").startswith("p")
    assert arrays["trellis"].reader.bytes_read == 0, "headers alone decide"


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("codebook", MARKERS)
def test_a_marker_of_either_sign_is_the_same_number(tmp_path: Path, codebook: str, dtype: type) -> None:
    tensors = sound(codebook=codebook)
    tensors[f"p.{codebook}"] = np.array(MARKERS[codebook], np.uint32).view(dtype)
    linear = describe(tmp_path, tensors)
    linear.check_marker()
    assert linear.codebook.name == codebook


@pytest.mark.parametrize("codebook", MARKERS)
@pytest.mark.parametrize("value", [0, 1, 0xCBAC1FEC, 0xFFFFFFFF])
def test_a_foreign_multiplier_is_refused_with_both_values(tmp_path: Path, codebook: str, value: int) -> None:
    tensors = sound(codebook=codebook)
    tensors[f"p.{codebook}"] = np.array(value, np.uint32).view(np.int32)
    linear = describe(tmp_path, tensors)
    with pytest.raises(FormatValueError, match=rf"p\.{codebook}: .*0x{value:08X}, expected 0x{MARKERS[codebook]:08X}"):
        linear.check_marker()


def test_3inst_has_no_marker_to_check(tmp_path: Path) -> None:
    linear = describe(tmp_path, sound(codebook="3inst"))
    linear.check_marker()
    assert linear.trellis.reader.bytes_read == 0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("suffix", "place"), [("suh", 255), ("svh", 0), ("bias", 17)])
def test_scales_are_finite(tmp_path: Path, suffix: str, place: int, value: float) -> None:
    tensors = sound(bias=np.float16)
    tensors[f"p.{suffix}"][place] = value
    linear = describe(tmp_path, tensors)
    read = {"suh": linear.read_input_scale, "svh": linear.read_output_scale, "bias": linear.read_bias}[suffix]
    with pytest.raises(FormatValueError, match=rf"p\.{suffix}: all values must be finite; .* at index {place}"):
        read()


def test_a_float32_bias_beyond_float16_is_refused(tmp_path: Path) -> None:
    tensors = sound(bias=np.float32)
    tensors["p.bias"][3] = 1e6
    with pytest.raises(FormatValueError, match=r"p\.bias: all values must be finite; value inf at index 3"):
        describe(tmp_path, tensors).read_bias()


def test_zeros_of_padded_columns_are_kept(tmp_path: Path) -> None:
    tensors = sound()
    tensors["p.svh"][100:] = [0.0, -0.0] * 14
    found = describe(tmp_path, tensors).read_output_scale()
    assert np.array_equal(found.view(np.uint16), tensors["p.svh"].view(np.uint16))


def test_suffixes_name_all_parts() -> None:
    assert set(LINEAR_SUFFIXES) == {"trellis", "suh", "svh", "su", "sv", "bias", "scale", "mcg", "mul1"}


DTYPES = st.sampled_from([np.int16, np.uint16, np.float16, np.int32, np.float32])
SHAPES = st.lists(st.sampled_from([0, 1, 8, 16, 24, 40, 48, 64, 128, 256]), max_size=4)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.dictionaries(st.sampled_from(LINEAR_SUFFIXES), st.tuples(SHAPES, DTYPES)), st.tuples(SHAPES, DTYPES))
def test_any_headers_are_described_or_refused(tmp_path: Path, parts: dict[str, Any], codes: Any) -> None:
    parts |= {"trellis": codes}
    tensors = {
        f"p.{suffix}": np.zeros(shape, dtype) for suffix, (shape, dtype) in parts.items() if np.prod(shape) < 2**20
    }
    tensors.setdefault("p.trellis", np.zeros(3, np.int16))
    try:
        linear = describe(tmp_path, tensors)
    except (FormatValueError, FormatTypeError):
        return
    assert linear.rate in ALL_RATES
    assert (linear.k % 128, linear.n % 128) == (0, 0)
    assert linear.read_input_scale().shape == (linear.k,)
    assert linear.read_output_scale().shape == (linear.n,)
