"""Holds the description of a layer to its own rules: sizes, rates, bytes, and repr."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from trellis_format.activations import Activation
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import MemoryArray
from trellis_format.rate_table import RateTable
from trellis_format.rates import Rate
from trellis_format.source import CodeLayout, ExpertGeometry, Projection, TrellisSource, TrellisWeights


def geometry(**changes: object) -> ExpertGeometry:
    sizes = {
        "num_experts": 3,
        "hidden_size": 320,
        "intermediate_size": 200,
        "padded_hidden_size": 384,
        "padded_intermediate_size": 256,
    }
    return ExpertGeometry(**sizes | changes)  # type: ignore[arg-type]


def source(**changes: object) -> TrellisSource:
    fields: dict[str, object] = {
        "codebook": "mul1",
        "geometry": geometry(),
        "rates": RateTable.of([[Rate.of(b) for b in row] for row in ((1, 2.5, 4), (8, 2, 3), (3, 3, 3.5))]),
        "layout": CodeLayout.EXL3_LINEAR,
        "extent": TrellisExtent.whole(256),
    }
    return TrellisSource(**fields | changes)  # type: ignore[arg-type]


def test_projections_come_as_gate_up_down() -> None:
    assert [str(projection) for projection in Projection] == ["gate", "up", "down"]
    assert geometry().projections == tuple(Projection)
    assert geometry().gated
    assert not geometry(projections=(Projection.UP, Projection.DOWN)).gated


def test_matrices_have_padded_sides() -> None:
    shapes = {str(projection): geometry().matrix(projection) for projection in Projection}
    assert shapes == {"gate": (384, 256), "up": (384, 256), "down": (256, 384)}


@pytest.mark.parametrize(
    "name", ["num_experts", "hidden_size", "intermediate_size", "padded_hidden_size", "padded_intermediate_size"]
)
@pytest.mark.parametrize("value", [0, -128])
def test_sizes_are_positive(name: str, value: int) -> None:
    with pytest.raises(FormatValueError, match=f"{name} must be positive, got {value}"):
        geometry(**{name: value})


@pytest.mark.parametrize("value", [True, 3.0, "3", None, np.int64(3)])
def test_sizes_are_python_ints(value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"num_experts must be an int, got {type(value).__name__}"):
        geometry(num_experts=value)


@pytest.mark.parametrize(
    ("true", "stored", "legal"), [(320, 320, 384), (320, 512, 384), (385, 384, 512), (128, 256, 128)]
)
def test_padding_is_to_the_next_block(true: int, stored: int, legal: int) -> None:
    with pytest.raises(FormatValueError, match=f"hidden_size {true} is stored in {legal} channels, not in {stored}"):
        geometry(hidden_size=true, padded_hidden_size=stored)


@pytest.mark.parametrize("names", [(), ("down",), ("up", "gate", "down"), ("gate", "down")])
def test_only_two_sets_of_projections_exist(names: tuple[str, ...]) -> None:
    with pytest.raises(FormatValueError, match=r"gate, up, down or up, down"):
        geometry(projections=tuple(map(Projection, names)))


def test_code_bytes_are_those_of_the_tiles() -> None:
    described = source()
    for expert in range(3):
        for extent in (None, TrellisExtent(global_intermediate_size=256, first_slot=4, slot_count=4)):
            width = 256 if extent is None else 128
            tiles = [(384 // 16) * (width // 16) * described.rates.rate(expert, index).tile_bytes for index in range(3)]
            assert described.expert_code_bytes(expert, extent) == sum(tiles)
    assert described.code_bytes() == sum(described.expert_code_bytes(expert) for expert in range(3))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0), "biased": (Projection.DOWN,)},
        {"up_divisor": 128.0, "activation": Activation("silu"), "joint_input_scales": True},
        {"geometry": geometry(projections=(Projection.UP, Projection.DOWN)), "rates": RateTable.uniform(Rate.of(2))},
    ],
)
def test_repr_evaluates_back(changes: dict[str, object]) -> None:
    described = source(**changes)
    assert eval(repr(described)) == described


def test_a_source_is_fixed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        source().codebook = "mcg"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"codebook": "mcg"}, r"codebook mcg has no half rate K = 2\.5"),
        ({"codebook": "lut"}, "unknown codebook 'lut'"),
        ({"rates": RateTable(((2, 4, 6), (2, 4, 6)))}, "2 x 3 does not fit 3 experts x 3 projections"),
        ({"extent": TrellisExtent.whole(384)}, "axis of 384 channels, the experts have 256"),
        (
            {"extent": TrellisExtent(global_intermediate_size=256, first_slot=2, slot_count=4)},
            r"channels 64\.\.192 cuts a Hadamard block",
        ),
        ({"up_divisor": 0.0}, r"up_divisor 0\.0 must be above 0"),
        ({"up_divisor": math.nan}, "up_divisor nan must be above 0"),
        ({"up_divisor": math.inf}, "up_divisor inf must be above 0 and finite"),
        ({"biased": (Projection.DOWN, Projection.GATE)}, "must be in order"),
        ({"biased": (Projection.DOWN, Projection.DOWN)}, "must be in order"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        source(**changes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("codebook", None),
        ("codebook", ["mcg"]),
        ("geometry", {}),
        ("rates", Rate.of(3)),
        ("layout", "exl3-linear"),
        ("extent", (0, 8)),
        ("biased", [Projection.DOWN]),
        ("up_divisor", "128"),
        ("activation", "silu"),
    ],
)
def test_fields_have_their_types(name: str, value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"source {name} has the wrong type {type(value).__name__}"):
        source(**{name: value})


def weights(codes: Callable[[], object]) -> TrellisWeights:
    half = np.zeros((3, 256), np.float16)
    return TrellisWeights(
        codes=codes(),  # type: ignore[arg-type]
        rate=np.array([0x33], np.uint8),
        input_scales=half,
        intermediate_scales=half + np.float16(1),
        output_scales=half + np.float16(2),
        biases={Projection.UP: half + np.float16(3)},
    )


def test_views_of_linears_are_found_by_expert_and_projection() -> None:
    views = [[MemoryArray(np.full((1, 1, 48), 10 * e + p, np.int16)) for p in range(3)] for e in range(2)]
    held = weights(lambda: tuple(map(tuple, views)))
    assert [[int(held.code_view(e, p).read()[0, 0, 0]) for p in range(3)] for e in range(2)] == [
        [0, 1, 2],
        [10, 11, 12],
    ]


def test_slot_major_codes_have_no_view_of_one_linear() -> None:
    held = weights(lambda: MemoryArray(np.zeros((8, 64), np.uint8)))
    with pytest.raises(FormatTypeError, match="slot-major"):
        held.code_view(0, 0)


def test_scale_arrays_are_named() -> None:
    named = weights(tuple).scale_arrays()
    assert {name: float(array[0, 0]) for name, array in named.items()} == {
        "input_scales": 0.0,
        "intermediate_scales": 1.0,
        "output_scales": 2.0,
        "bias.up": 3.0,
    }
