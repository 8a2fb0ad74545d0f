"""Holds the declarations to their rules and to reprs that evaluate back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moe.samples import LAWS
from trellis_format.activations import Activation
from trellis_moe import (
    ARITHMETICS,
    IO_DTYPES,
    ActivationSpec,
    ExecutionCapacity,
    MoeError,
    MoeGeometry,
    MoeTypeError,
    MoeValueError,
    RoutingSpec,
)
from trellis_moe.specs import check_type, io_dtype_name

SPECS = [
    *(ActivationSpec(nonlinearity=law, io_dtype=name) for law in LAWS for name in IO_DTYPES),
    ActivationSpec(nonlinearity=LAWS[0], io_dtype="bfloat16", output_dtype="bfloat16", rotation_dtype="float16"),
    *(ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16", arithmetic=name) for name in ARITHMETICS),
    RoutingSpec(),
    RoutingSpec(deterministic_output=False),
    RoutingSpec(apply_router_weight_on_input=True),
    ExecutionCapacity(max_tokens=1, top_k=64),
    ExecutionCapacity(max_tokens=9, top_k=2, token_counts=(1, 8), scratch_bound=1 << 20, route_experts=64),
    MoeGeometry(num_experts=8, hidden_size=256, intermediate_size=128),
]


@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_repr_evaluates_back_and_nothing_can_be_changed(spec: Any) -> None:
    again = eval(repr(spec))
    assert again == spec
    assert hash(again) == hash(spec)
    name = dataclasses.fields(spec)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(spec, name, getattr(spec, name))


@pytest.mark.parametrize(
    ("changes", "kind", "parts"),
    [
        ({"nonlinearity": "silu"}, MoeTypeError, ("nonlinearity", "an Activation", "str")),
        (
            {"nonlinearity": Activation("silu", limit=1e300)},
            MoeValueError,
            ("limit 1e+300", "float32, the largest is 3.4"),
        ),
        ({"nonlinearity": Activation("swigluoai", beta=-1e39)}, MoeValueError, ("beta -1e+39", "beyond float32")),
        ({"io_dtype": "float64"}, MoeValueError, ("io_dtype", "'float64'", "float16, bfloat16, float32")),
        ({"io_dtype": torch.float16}, MoeValueError, ("io_dtype", "torch.float16", "names")),
        ({"io_dtype": ["float16"]}, MoeValueError, ("io_dtype", "['float16']")),
        ({"output_dtype": "int8"}, MoeValueError, ("output_dtype", "'int8'", "float16, bfloat16, float32")),
        ({"arithmetic": "fp8"}, MoeValueError, ("arithmetic", "'fp8'", "exact, unrounded, bytes")),
        ({"rotation_dtype": "bfloat16"}, MoeValueError, ("rotation_dtype", "'bfloat16'", "float16")),
    ],
)
def test_activation_refusals_name_both_values(
    changes: dict[str, Any], kind: type[MoeError], parts: tuple[str, ...]
) -> None:
    with pytest.raises(kind) as caught:
        ActivationSpec(**{"nonlinearity": Activation("silu"), "io_dtype": "float16"} | changes)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("name", ["deterministic_output", "apply_router_weight_on_input"])
@pytest.mark.parametrize("value", [0, None, "yes"])
def test_policies_are_a_yes_or_a_no(name: str, value: Any) -> None:
    with pytest.raises(MoeTypeError, match=f"{name} must be a bool, got {type(value).__name__}"):
        RoutingSpec(**{name: value})


@pytest.mark.parametrize("name", ["num_experts", "hidden_size", "intermediate_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True])
def test_sizes_are_positive_ints(name: str, value: Any) -> None:
    with pytest.raises(MoeError, match=f"{name} must be"):
        MoeGeometry(**{"num_experts": 8, "hidden_size": 256, "intermediate_size": 128} | {name: value})


def test_token_counts_ascend_without_repeats_and_end_in_the_largest_run() -> None:
    capacity = ExecutionCapacity(max_tokens=64, top_k=2, token_counts=(8, 1, 8, 32))
    assert capacity.token_counts == (1, 8, 32)
    assert capacity.launch_tokens == (1, 8, 32, 64)
    assert capacity == ExecutionCapacity(max_tokens=64, top_k=2, token_counts=(32, 8, 1))
    assert ExecutionCapacity(max_tokens=64, top_k=2, token_counts=(64,)).launch_tokens == (64,)


@pytest.mark.parametrize(
    ("counts", "kind", "words"),
    [
        ((0,), MoeValueError, "a token count must be positive, got 0"),
        ((65,), MoeValueError, "token count 65 is above max_tokens 64"),
        ((8.0,), MoeTypeError, "a token count must be an int, got float"),
        (8, MoeTypeError, "token_counts must be an Iterable, got int"),
    ],
)
def test_token_counts_that_cannot_be_are_refused(counts: Any, kind: type[MoeError], words: str) -> None:
    with pytest.raises(kind, match=words):
        ExecutionCapacity(max_tokens=64, top_k=2, token_counts=counts)


@pytest.mark.parametrize("name", ["scratch_bound", "route_experts"])
@pytest.mark.parametrize("value", [0, -1, 1.5, False])
def test_optional_numbers_are_positive_ints(name: str, value: Any) -> None:
    with pytest.raises(MoeError, match=f"{name} must be"):
        ExecutionCapacity(max_tokens=64, top_k=2, **{name: value})


@pytest.mark.parametrize("name", ["max_tokens", "top_k"])
@pytest.mark.parametrize(
    ("value", "kind", "part"),
    [
        (0, MoeValueError, "got 0"),
        (-7, MoeValueError, "got -7"),
        (True, MoeTypeError, "got bool"),
        (4.0, MoeTypeError, "got float"),
        ("4", MoeTypeError, "got str"),
        (None, MoeTypeError, "got NoneType"),
    ],
)
def test_capacity_refusals_name_the_field(name: str, value: Any, kind: type[MoeError], part: str) -> None:
    with pytest.raises(kind, match=f"{name} must be .*{part}"):
        ExecutionCapacity(**{"max_tokens": 8, "top_k": 2} | {name: value})


def test_routes_stay_within_31_bits() -> None:
    assert ExecutionCapacity(max_tokens=(1 << 31) - 1, top_k=1).routes == (1 << 31) - 1
    with pytest.raises(MoeValueError, match=r"1073741824 tokens x 2 routes exceed 2\^31 - 1"):
        ExecutionCapacity(max_tokens=1 << 30, top_k=2)


@pytest.mark.parametrize(("name", "dtype"), IO_DTYPES.items())
def test_io_dtypes_have_names(name: str, dtype: torch.dtype) -> None:
    assert io_dtype_name(dtype) == name


def test_other_dtypes_have_none() -> None:
    with pytest.raises(MoeTypeError, match=r"float16, bfloat16, float32, got torch\.float64"):
        io_dtype_name(torch.float64)


def test_check_type_names_both_types() -> None:
    check_type("count", 3, int)
    with pytest.raises(MoeTypeError, match="count must be an Activation, got int"):
        check_type("count", 3, Activation)
