"""Holds native layers to their configuration, and what is made of them to their stored numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from format.native.test_config import GLM, GROUPED, K3, PLAIN
from slot_files import edited, halves, linear_by_loop, random_linears, rates_of, rows_by_loop
from trellis_format.activations import Activation
from trellis_format.errors import FormatTypeError, FormatUnsupportedError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.native.config import parse_config
from trellis_format.native.layer import NativeLayer, source_of, trellis_from_native
from trellis_format.native.layer import rates_of as layer_rates
from trellis_format.native.scales import ScaleFactors
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.slots import read_linear
from trellis_format.source import CodeLayout, ExpertGeometry, Projection
from trellis_format.transform import ExpertTransform

GEOMETRY = ExpertGeometry(
    num_experts=3, hidden_size=512, intermediate_size=256, padded_hidden_size=512, padded_intermediate_size=256
)
WHOLE = TrellisExtent.whole(256)
PLAIN_SCALES = {
    "input_scales": {"vectors": "per_expert", "gains": "none"},
    "intermediate_scales": {"vectors": "per_expert", "gains": "none"},
    "output_scales": {"vectors": "per_expert", "gains": "none"},
}


def glm_layer(seed: int = 0, **changes: Any) -> NativeLayer:
    """A layer of mixed rates, vectors shared at both ends, no gains and no transform."""
    rng = np.random.default_rng(seed)
    rate = np.array([[0x33, 0x33, 0x44], [0x55, 0x33, 0x66], [0x44, 0x44, 0x44]], np.uint8)
    payload = int((512 // 16 * 64 * (rate.astype(int) & 15)).sum())
    fields: dict[str, Any] = {
        "config": parse_config(GLM),
        "geometry": GEOMETRY,
        "extent": WHOLE,
        "codes": rng.integers(0, 256, (8, payload), dtype=np.uint8),
        "rate": rate,
        "input_scales": ScaleFactors(halves(rng, 2, 512)),
        "intermediate_scales": ScaleFactors(halves(rng, 3, 3, 256)),
        "output_scales": ScaleFactors(halves(rng, 512)),
    }
    return NativeLayer(**fields | changes)


def k3_layer(extent: TrellisExtent = WHOLE, seed: int = 0, **changes: Any) -> NativeLayer:
    """A layer of one rate with gains and an intermediate Hadamard; gate and up have an input vector each."""
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "config": parse_config(K3),
        "geometry": GEOMETRY,
        "extent": extent,
        "codes": rng.integers(0, 256, (extent.slot_count, 3 * 3 * 32 * 64 * 2), dtype=np.uint8),
        "rate": np.array([0x22], np.uint8),
        "input_scales": ScaleFactors(halves(rng, 2, 512), halves(rng, 2)),
        "intermediate_scales": ScaleFactors(halves(rng, 3, extent.width), halves(rng, 3, 3)),
        "output_scales": ScaleFactors(halves(rng, 512), halves(rng, 1)),
        "expert_sign_patterns": np.array([0, 7, 3], np.uint8),
    }
    return NativeLayer(**fields | changes)


def test_codes_and_plain_scales_are_views() -> None:
    layer = glm_layer()
    source, weights = trellis_from_native(layer)
    assert weights.codes.read().ctypes.data == layer.codes.read().ctypes.data  # type: ignore[union-attr]
    assert weights.input_scales.ctypes.data == layer.input_scales.vectors.ctypes.data
    assert weights.output_scales.tobytes() == layer.output_scales.vectors.tobytes()
    assert weights.intermediate_scales.tobytes() == layer.intermediate_scales.vectors.tobytes()
    assert weights.rate is layer.rate
    assert source.layout is CodeLayout.SLOT_MAJOR
    assert (source.shared_input_scales, source.joint_input_scales, source.shared_output_scales) == (True, False, True)
    assert source.rates == RateTable(((6, 6, 8), (10, 6, 12), (8, 8, 8)))
    assert source.expert_transform is None


def test_linears_are_those_that_a_loop_picks_out() -> None:
    layer = glm_layer()
    source, weights = trellis_from_native(layer)
    for expert in range(3):
        for projection in range(3):
            expected = linear_by_loop(layer.codes.read(), rates_of(source), 512, expert, projection)
            assert np.array_equal(read_linear(source, weights, expert, projection), expected)


def test_nothing_of_the_layer_is_changed() -> None:
    layer = k3_layer(TrellisExtent(global_intermediate_size=256, first_slot=4, slot_count=4))
    arrays = [layer.codes.read(), layer.rate, layer.input_scales.vectors, layer.intermediate_scales.gains]
    before = [array.tobytes() for array in arrays]  # type: ignore[union-attr]
    for array in arrays:
        array.setflags(write=False)  # type: ignore[union-attr]
    trellis_from_native(layer)
    assert [array.tobytes() for array in arrays] == before  # type: ignore[union-attr]


@pytest.mark.parametrize("half", [0, 1])
def test_each_half_of_the_slots_has_its_own_input_vector(half: int) -> None:
    layer = k3_layer(TrellisExtent(global_intermediate_size=256, first_slot=4 * half, slot_count=4))
    source, weights = trellis_from_native(layer)
    vector, gains = layer.input_scales.vectors[half].astype(np.float64), layer.input_scales.gains
    assert np.array_equal(weights.input_scales[0], (vector * float(gains[half])).astype(np.float16))  # type: ignore[index]
    assert weights.input_scales.shape == (1, 512)
    assert source.joint_input_scales
    assert source.expert_transform == ExpertTransform()
    middle = layer.intermediate_scales
    for expert in range(3):
        for row in range(3):
            exact = middle.vectors[row].astype(np.float64) * float(middle.gains[expert, row])  # type: ignore[index]
            assert np.array_equal(weights.intermediate_scales[expert, row], exact.astype(np.float16))


def test_two_input_vectors_cannot_serve_both_halves() -> None:
    with pytest.raises(FormatValueError, match=r"slots 0\.\.8 crosses the half boundary at slot 4"):
        trellis_from_native(k3_layer())


def test_one_input_vector_serves_both_halves() -> None:
    rng = np.random.default_rng(1)
    one = ScaleFactors(halves(rng, 512), halves(rng, 1))
    source, weights = trellis_from_native(k3_layer(input_scales=one))
    assert source.extent.is_whole
    assert weights.input_scales.shape == (1, 512)


def test_shared_intermediate_vectors_are_given_to_every_expert() -> None:
    config = parse_config(edited(GLM, "scale.intermediate_scales.vectors", "per_layer"))
    vectors = halves(np.random.default_rng(1), 3, 256)
    _, weights = trellis_from_native(glm_layer(config=config, intermediate_scales=ScaleFactors(vectors)))
    assert weights.intermediate_scales.shape == (3, 3, 256)
    assert all(np.array_equal(row, vectors) for row in weights.intermediate_scales)


def test_what_only_some_models_have_is_carried() -> None:
    law = Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)
    rng = np.random.default_rng(1)
    biases = {Projection.UP: halves(rng, 3, 256), Projection.DOWN: halves(rng, 3, 512)}
    layer = glm_layer(biases=biases, up_divisor=128.0, activation=law)
    source, weights = trellis_from_native(layer)
    assert (source.biased, source.up_divisor, source.activation) == ((Projection.UP, Projection.DOWN), 128.0, law)
    assert weights.biases == biases


def test_experts_without_a_gate() -> None:
    linears = random_linears(gated=False)
    config = parse_config({**GLM, "codebook": "mul1", "scale": PLAIN_SCALES})
    layer = NativeLayer(
        config=config,
        geometry=linears[0].geometry,
        extent=linears[0].extent,
        codes=MemoryArray(rows_by_loop(linears)),
        rate=linears[0].rates.rate_bytes(),
        input_scales=ScaleFactors(linears[1].input_scales[:, 0]),
        intermediate_scales=ScaleFactors(linears[1].intermediate_scales),
        output_scales=ScaleFactors(linears[1].output_scales),
    )
    source, weights = trellis_from_native(layer)
    assert source.geometry.projections == (Projection.UP, Projection.DOWN)
    for index in range(6):
        expected = linears[1].code_view(*divmod(index, 2)).read()
        assert np.array_equal(read_linear(source, weights, *divmod(index, 2)), expected)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"codes": np.zeros((8, 8), np.int16)}, FormatValueError, "codes must be uint8, got int16"),
        ({"codes": np.zeros((8, 8, 1), np.uint8)}, FormatValueError, r"codes must be 2-D .*got shape \[8, 8, 1\]"),
        ({"codes": np.zeros((8, 256), np.uint8)[:, ::2]}, FormatValueError, "codes must have contiguous rows"),
        ({"codes": np.zeros((7, 73728), np.uint8)}, FormatValueError, "codes have 7 rows, one for each slot .* not 8"),
        (
            {"codes": np.zeros((8, 73727), np.uint8)},
            FormatValueError,
            r"have 73727 bytes, their payload is ",
        ),
        ({"rate": np.array([0x33], np.uint8)}, FormatValueError, r"rate must have shape \[3, 3\] .* got \[1\]"),
        ({"rate": np.full((3, 3), 0x33, np.int16)}, FormatTypeError, "rate must be uint8, got int16"),
        ({"rate": np.full((3, 3), 0x34, np.uint8)}, FormatValueError, r"rate\[0, 0\]: rate byte 0x34 .*symmetric"),
        ({"rate": np.full((3, 3), 0xCC, np.uint8)}, FormatValueError, "rate byte 0xCC: rate nibble 12 is illegal"),
        ({"rate": np.full((3, 3), 0xAA, np.uint8)}, FormatValueError, r"codebook mcg has no half rate K = 2\.5; legal"),
        ({"expert_sign_patterns": np.zeros(3, np.uint8)}, FormatValueError, "sign_pattern without an intermediate Had"),
        ({"biases": {Projection.UP: np.ones((3, 256), np.float32)}}, FormatTypeError, "bias of up must be float16"),
        ({"biases": {Projection.UP: np.ones((3, 512), np.float16)}}, FormatValueError, r"bias of up must .*\[3, 256\]"),
        (
            {"biases": {Projection.DOWN: np.full((3, 512), np.nan, np.float16)}},
            FormatValueError,
            r"bias of down must be finite, got nan at \[0, 0\]",
        ),
        (
            {"uniform_bits": 3},
            FormatValueError,
            "uniform_bits 3 needs rates that are uniform, they are per_expert",
        ),
        ({"config": parse_config(GROUPED)}, FormatUnsupportedError, "rates in groups of 256"),
        ({"config": parse_config(PLAIN)}, FormatUnsupportedError, "projection transform none"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        trellis_from_native(glm_layer(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"expert_sign_patterns": None}, "sign_pattern is required with the intermediate Hadamard"),
        ({"expert_sign_patterns": np.array([0, 8, 9], np.uint8)}, "sign_pattern of expert 1 is 8"),
        ({"expert_sign_patterns": np.zeros(3, np.int32)}, r"sign_pattern must be uint8 \[3\]"),
        ({"uniform_bits": 3}, "uniform_bits is 3, observed in the rate tensor: 2"),
        ({"uniform_bits": 5}, "codebook lut_e4m3 has no K = 5; legal K: 2, 3, 4"),
        ({"uniform_bits": 2.25}, "bitrate K = 2.25 is not a multiple of 1/2"),
    ],
)
def test_signs_and_uniform_bits_must_fit(changes: dict[str, Any], text: str) -> None:
    half = TrellisExtent(global_intermediate_size=256, first_slot=0, slot_count=4)
    with pytest.raises(FormatValueError, match=text):
        trellis_from_native(k3_layer(half, **changes))


def test_other_types_are_refused() -> None:
    with pytest.raises(FormatTypeError, match="expected a NativeLayer, got dict"):
        trellis_from_native({})  # type: ignore[arg-type]
    for name, kind in (("config", "TrellisConfig"), ("geometry", "ExpertGeometry"), ("extent", "TrellisExtent")):
        with pytest.raises(FormatTypeError, match=f"{name} of a layer must be {kind}, got dict"):
            glm_layer(**{name: {}})
    with pytest.raises(FormatTypeError, match="input_scales must be ScaleFactors, got ndarray"):
        glm_layer(input_scales=np.ones(512, np.float16))
    with pytest.raises(FormatTypeError, match="rate must be an array, got list"):
        glm_layer(rate=[0x33])


def test_a_bare_configuration_becomes_a_source() -> None:
    config = parse_config(K3)
    half = TrellisExtent(global_intermediate_size=256, first_slot=4, slot_count=4)
    source = source_of(config, geometry=GEOMETRY, uniform_bits=2, extent=half, joint_input_scales=True)
    assert source.rates == RateTable.uniform(Rate.of(2))
    assert source.expert_transform == ExpertTransform()
    assert (source.shared_input_scales, source.shared_output_scales) == (True, True)
    assert source_of(source) is source
    by_tensor = source_of(
        config, geometry=GEOMETRY, rate=np.array([0x22], np.uint8), extent=half, joint_input_scales=True
    )
    assert by_tensor == source
    whole = source_of(parse_config(GLM), geometry=GEOMETRY, rate=np.full((3, 3), 0x44, np.uint8))
    assert whole.extent == WHOLE
    gains = parse_config(edited(GLM, "scale.output_scales.gains", "per_expert"))
    assert not source_of(gains, geometry=GEOMETRY, rate=np.full((3, 3), 0x44, np.uint8)).shared_output_scales


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"uniform_bits": 2}, FormatValueError, "no sizes; give the geometry"),
        ({"geometry": GEOMETRY}, FormatValueError, "rates are missing; give the rate tensor or uniform_bits"),
        (
            {"geometry": GEOMETRY, "uniform_bits": True},
            FormatTypeError,
            "uniform_bits must be a number or a Rate",
        ),
        (
            {"geometry": GEOMETRY, "uniform_bits": "2"},
            FormatTypeError,
            "uniform_bits must be a number or a Rate",
        ),
        ({"geometry": GEOMETRY, "uniform_bits": 1}, FormatValueError, "lut_e4m3 has no K = 1; legal K: 2, 3, 4"),
    ],
)
def test_a_configuration_alone_is_not_enough(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        source_of(parse_config(K3), joint_input_scales=True, **arguments)


def test_other_descriptions_are_refused() -> None:
    with pytest.raises(FormatTypeError, match="expected a TrellisConfig or a TrellisSource, got dict"):
        source_of(K3)  # type: ignore[arg-type]


def test_rates_may_be_given_twice_where_they_agree() -> None:
    config = parse_config(edited(K3, "codebook", "mul1"))
    found = layer_rates(config, GEOMETRY, np.array([0xAA], np.uint8), Rate.of(2.5))
    assert found == RateTable.uniform(Rate.of(2.5)) == layer_rates(config, GEOMETRY, None, 2.5)
