"""Holds the checks of weights to each thing that a source states about them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from prep.samples import Layer, extent_of, random_layer
from trellis_format.files.arrays import MemoryArray
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, Projection
from trellis_format.transform import ExpertTransform
from trellis_prep import PrepTypeError, PrepValueError
from trellis_prep.checks import check_weights
from trellis_prep.layout import check_source


def with_code(layer: Layer, expert: int, projection: int, array: np.ndarray[Any, Any]) -> Layer:
    """A layer with another array as one linear's codes."""
    rows = [list(row) for row in layer[1].codes]
    rows[expert][projection] = MemoryArray(array)
    return layer[0], dataclasses.replace(layer[1], codes=tuple(tuple(row) for row in rows))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("experts", [1, 3])
def test_weights_that_fit_pass(gated: bool, shared: bool, joint: bool, experts: int) -> None:
    check_weights(*random_layer(gated=gated, shared=shared, joint=joint, experts=experts, biased=True))


def test_shared_is_what_the_source_declares_and_not_the_shape() -> None:
    source, weights = random_layer(experts=1)
    declared = dataclasses.replace(source, shared_input_scales=True)
    with pytest.raises(PrepValueError, match=r"input_scales must be \[2, 256\], got \[1, 2, 256\]"):
        check_weights(declared, weights)


def test_rate_bytes_may_have_their_long_form() -> None:
    source, weights = random_layer(rates=("3",))
    check_weights(source, dataclasses.replace(weights, rate=np.full((3, 3), 0x33, dtype=np.uint8)))
    check_weights(source, dataclasses.replace(weights, rate=np.full(3, 0x33, dtype=np.uint8)))


def test_rate_that_differs_is_observed() -> None:
    source, weights = random_layer(rates=("3",))
    rate = np.full((3, 3), 0x33, dtype=np.uint8)
    rate[1, 2] = 0x44
    with pytest.raises(PrepValueError, match=r"expert 1 down: observed rate byte 0x44, .* K = 3, which is 0x33"):
        check_weights(source, dataclasses.replace(weights, rate=rate))
    rate[1, 2] = 0x34
    with pytest.raises(PrepValueError, match="observed rate byte 0x34"):
        check_weights(source, dataclasses.replace(weights, rate=rate))
    with pytest.raises(PrepValueError, match=r"rate must be \[1\], \[3\] or \[3, 3\] bytes, got \[2\]"):
        check_weights(source, dataclasses.replace(weights, rate=rate[0, :2]))
    with pytest.raises(PrepTypeError, match="rate must be uint8, got int64"):
        check_weights(source, dataclasses.replace(weights, rate=np.array([0x33])))


def test_codes_of_another_shape_or_dtype_are_named() -> None:
    layer = random_layer(rates=("2",))
    tiles = layer[1].code_view(2, 1).read()
    with pytest.raises(PrepValueError, match=r"expert 2 up must be \[16, 24, 32\] .* got \[16, 23, 32\]"):
        check_weights(*with_code(layer, 2, 1, tiles[:, 1:]))
    with pytest.raises(PrepTypeError, match="expert 2 up must be int16, got uint16"):
        check_weights(*with_code(layer, 2, 1, tiles.view(np.uint16)))
    wide = np.zeros((24, 16, Rate.of("4").tile_words16), dtype=np.int16)
    with pytest.raises(PrepValueError, match=r"expert 0 down must be \[24, 16, 32\] .* got \[24, 16, 64\]"):
        check_weights(*with_code(layer, 0, 2, wide))


def test_missing_codes_are_counted() -> None:
    source, weights = random_layer()
    with pytest.raises(PrepValueError, match=r"codes are of 2 experts x \[3\] projections, the source has 3 x 3"):
        check_weights(source, dataclasses.replace(weights, codes=weights.codes[:2]))
    ragged = (weights.codes[0][:2], *weights.codes[1:])
    with pytest.raises(PrepValueError, match=r"3 experts x \[2, 3\] projections"):
        check_weights(source, dataclasses.replace(weights, codes=ragged))
    with pytest.raises(PrepTypeError, match="one array per expert and projection, got MemoryArray"):
        check_weights(source, dataclasses.replace(weights, codes=MemoryArray(np.zeros((2, 2), np.uint8))))


@pytest.mark.parametrize("name", ["input_scales", "intermediate_scales", "output_scales"])
def test_tables_of_another_shape_or_dtype_are_named(name: str) -> None:
    source, weights = random_layer()
    array = getattr(weights, name)
    with pytest.raises(PrepValueError, match=f"{name} must be .* got"):
        check_weights(source, dataclasses.replace(weights, **{name: array[..., :-1]}))
    with pytest.raises(PrepTypeError, match=f"{name} must be float16, got float32"):
        check_weights(source, dataclasses.replace(weights, **{name: array.astype(np.float32)}))


def test_weights_of_the_whole_axis_do_not_fit_the_source_of_a_part() -> None:
    source, weights = random_layer()
    part = dataclasses.replace(source, extent=extent_of(384, 0, 1))
    with pytest.raises(PrepValueError, match=r"expert 0 gate must be \[16, 8, .* got \[16, 24"):
        check_weights(part, weights)


def test_biases_must_be_those_that_the_source_names() -> None:
    source, weights = random_layer(biased=True)
    fewer = {Projection.UP: weights.biases[Projection.UP]}
    with pytest.raises(PrepValueError, match="biases for up, the source says down, gate, up"):
        check_weights(source, dataclasses.replace(weights, biases=fewer))
    plain = dataclasses.replace(source, biased=())
    with pytest.raises(PrepValueError, match="the source says none"):
        check_weights(plain, weights)
    short = weights.biases | {Projection.DOWN: weights.biases[Projection.DOWN][:, :-1]}
    with pytest.raises(PrepValueError, match=r"bias\.down must be \[3, 256\], got \[3, 255\]"):
        check_weights(source, dataclasses.replace(weights, biases=short))


def test_sign_patterns_come_with_an_intermediate_hadamard_and_are_in_range() -> None:
    wide, weights = random_layer(hidden=512, joint=True)
    signed = dataclasses.replace(weights, expert_sign_patterns=np.array([0, 7, 3], dtype=np.uint8))
    under = dataclasses.replace(wide, expert_transform=ExpertTransform())
    check_weights(under, signed)
    with pytest.raises(PrepValueError, match="sign patterns are absent, the source is under an intermediate Hadamard"):
        check_weights(under, weights)
    with pytest.raises(PrepValueError, match="sign patterns are given, the source is without"):
        check_weights(wide, signed)
    for wrong, kind, message in (
        (np.array([0, 8, 1], dtype=np.uint8), PrepValueError, r"sign_pattern of expert 1 is 8; patterns are 0\.\.7"),
        (np.array([0, 1], dtype=np.uint8), PrepValueError, r"must be uint8 \[3\].* got uint8 \[2\]"),
        ([0, 1, 2], PrepTypeError, "sign_pattern must be an array, got list"),
    ):
        with pytest.raises(kind, match=message):
            check_weights(under, dataclasses.replace(weights, expert_sign_patterns=wrong))


def test_other_objects_are_no_source_and_no_weights() -> None:
    source, weights = random_layer()
    with pytest.raises(PrepTypeError, match="source must be a TrellisSource, got dict"):
        check_source({})  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="weights must be TrellisWeights, got TrellisSource"):
        check_weights(source, source)  # type: ignore[arg-type]
    with pytest.raises(PrepTypeError, match="slot-major codes must be one array, got tuple"):
        check_weights(dataclasses.replace(source, layout=CodeLayout.SLOT_MAJOR), weights)
    check_source(source)
    assert weights.codes
