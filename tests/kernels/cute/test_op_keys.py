"""Holds the keys of the ops around the GEMM to what keys promise, and their registry to what launches can ask for."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from trellis_format.activations import ACTIVATIONS
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.keys import VALUE_BYTES, KernelKey
from trellis_kernels.cute.op_keys import (
    ActivateKey,
    PackKey,
    ReduceKey,
    RotateKey,
    op_keys,
    pack_class,
    pack_tile_routes,
    pack_tiles,
)
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.errors import KernelUnsupportedError, KernelValueError

KEYS: list[tuple[KernelKey, dict[str, object]]] = [
    (
        RotateKey("sm_90a", "input", 128, "bfloat16", "float16", True, 4),
        {
            "arch": "sm_80",
            "side": "output",
            "block": 512,
            "in_dtype": "float32",
            "out_dtype": "float32",
            "wide": False,
            "rows_at_once": 1,
        },
    ),
    (ActivateKey("sm_90a", "silu"), {"arch": "sm_80", "kind": "situ"}),
    (PackKey("sm_90a", "place", 128, True), {"arch": "sm_80", "stage": "all", "max_experts": 1024, "stable": False}),
    (
        ReduceKey("sm_90a", "ordered", "float16", "bfloat16", True),
        {
            "arch": "sm_80",
            "stage": "accumulate",
            "weight_dtype": "float32",
            "out_dtype": "float16",
            "wide": False,
        },
    ),
]


@pytest.mark.parametrize(("key", "others"), KEYS, ids=lambda value: getattr(value, "kernel", ""))
def test_every_field_changes_the_key_its_name_and_its_repr(key: KernelKey, others: dict[str, object]) -> None:
    assert others.keys() == {field.name for field in dataclasses.fields(key)}
    changed = {dataclasses.replace(key, **{name: value}) for name, value in others.items()} | {key}
    assert len(changed) == len(others) + 1
    assert len({str(each) for each in changed}) == len(others) + 1
    assert all(eval(repr(each)) == each for each in changed)


@pytest.mark.parametrize(
    ("key", "change", "text"),
    [
        (0, {"side": "middle"}, "side 'middle' is not one of input, output"),
        (0, {"block": 256}, "block 256 is not one of 128, 512"),
        (0, {"in_dtype": "float64"}, "in_dtype 'float64' is not one of float16"),
        (0, {"rows_at_once": 2}, "rows_at_once 2 is not one of 1, 4"),
        (1, {"kind": "relu"}, "activation 'relu' is not one of silu"),
        (2, {"stage": "sort"}, "stage 'sort' is not one of all, count"),
        (2, {"max_experts": 100}, "max_experts 100 is not one of 128, 1024, 4096"),
        (3, {"stage": "sum"}, "stage 'sum' is not one of ordered, zero"),
        (3, {"arch": "sm_70"}, "unknown architecture 'sm_70'"),
    ],
)
def test_illegal_keys_are_refused(key: int, change: dict[str, object], text: str) -> None:
    with pytest.raises(KernelValueError, match=text):
        dataclasses.replace(KEYS[key][0], **change)


@pytest.mark.parametrize("arch", ARCHS)
def test_registry_has_each_once(arch: str) -> None:
    keys = op_keys(arch)
    assert len(keys) == len(set(keys))
    assert set(keys) <= set(registered_keys(arch))
    assert {key.kind for key in keys if isinstance(key, ActivateKey)} == set(ACTIVATIONS)


def test_registry_has_what_rotations_can_ask_for() -> None:
    found = {dataclasses.astuple(key)[1:] for key in op_keys("sm_90a") if isinstance(key, RotateKey)}
    sides = [("input", ("float16", "float32")), ("output", tuple(VALUE_BYTES))]
    wanted = {
        (side, block, in_dtype, out_dtype, wide, rows)
        for side, outs in sides
        for block, in_dtype, out_dtype, wide, rows in itertools.product(
            (128, 512), VALUE_BYTES, outs, (True, False), (1, 4)
        )
        if rows == 1 or (wide and block == 128)
    }
    assert found == wanted


def test_registry_has_what_reductions_can_ask_for() -> None:
    found = {dataclasses.astuple(key)[1:] for key in op_keys("sm_90a") if isinstance(key, ReduceKey)}
    both = (True, False)
    wanted = {("ordered", *rest) for rest in itertools.product(VALUE_BYTES, VALUE_BYTES, both)}
    wanted |= {("zero", "float32", "float32", True)}
    wanted |= {("accumulate", weight, out, True) for weight in VALUE_BYTES for out in ("float16", "bfloat16")}
    wanted |= {("copy", "float32", out, wide) for out in ("float16", "bfloat16") for wide in both}
    assert found == wanted


def test_a_tile_of_packing_is_whole_warps_of_routes() -> None:
    assert [pack_tile_routes(size) for size in PackKey.EXPERT_CLASSES] == [2048, 2048, 512]


@pytest.mark.parametrize(
    ("routes", "num_experts", "tiles"), [(0, 1, 1), (2048, 128, 1), (2049, 128, 2), (513, 4096, 2)]
)
def test_tiles_of_packing_cover_the_routes(routes: int, num_experts: int, tiles: int) -> None:
    assert pack_tiles(routes, num_experts) == tiles


def test_packing_refuses_experts_beyond_its_classes() -> None:
    with pytest.raises(KernelUnsupportedError, match="4096 experts, got 4097"):
        pack_class(4097)
