"""Holds compile keys to all that kernels are generated from, and to nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from moe.samples import LAWS, Layer, make_layer
from trellis_format.activations import Activation
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.layers import DeviceLimits
from trellis_moe import ActivationSpec, ExecutionCapacity, MoeValueError, RoutingSpec, plan_execution, plan_weights
from trellis_prep import even_extents

HOPPER = DeviceLimits(arch="sm_90a", multiprocessors=132)
BASE: dict[str, Any] = {"intermediate": 768, "experts": 64, "rates": ("3",)}
PATHS = {"few tokens": 8, "many tokens": 4096, "op by op": 8}


def keys(
    path: str,
    *,
    layer: dict[str, Any] | None = None,
    share: int = 1,
    activation: dict[str, Any] | None = None,
    routing: dict[str, Any] | None = None,
    capacity: dict[str, Any] | None = None,
    limits: DeviceLimits = HOPPER,
) -> frozenset[KernelKey]:
    """The keys of a plan that differs from the plain one as told; `op by op` is for weights of routes on the input."""
    made: Layer = make_layer(**BASE | (layer or {}))
    law = made.source.activation
    assert law is not None
    plan = plan_execution(
        plan_weights(made.source, even_extents(768, share)[0]),
        activation=ActivationSpec(**{"nonlinearity": law, "io_dtype": "bfloat16"} | (activation or {})),
        routing=RoutingSpec(**{"apply_router_weight_on_input": path == "op by op"} | (routing or {})),
        capacity=ExecutionCapacity(**{"max_tokens": PATHS[path], "top_k": 2} | (capacity or {})),
        device="cuda",
        limits=limits,
    )
    assert plan.variants[-1].path == {"few tokens": "moe_small", "many tokens": "prefill"}.get(path, "op_by_op")
    return frozenset(plan.compile_keys())


EVERYWHERE = ["few tokens", "many tokens", "op by op"]
FUSED = EVERYWHERE[:2]
MATTERS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("io dtype", {"activation": {"io_dtype": "float16"}}, EVERYWHERE),
    ("output dtype", {"activation": {"output_dtype": "bfloat16"}}, EVERYWHERE),
    ("law", {"layer": {"activation": LAWS[2]}}, EVERYWHERE),
    ("law's constant", {"layer": {"activation": Activation("silu", limit=0.5)}}, FUSED),
    ("law without a gate", {"layer": {"activation": LAWS[5]}}, EVERYWHERE),
    ("arithmetic", {"activation": {"arithmetic": "bytes"}}, ["few tokens"]),
    ("codebook", {"layer": {"codebook": "mcg"}}, FUSED),
    ("rate", {"layer": {"rates": ("4",)}}, EVERYWHERE),
    ("rates", {"layer": {"rates": ("3", "4")}}, EVERYWHERE),
    ("biases", {"layer": {"biased": True}}, FUSED),
    ("vectors", {"layer": {"shared": True}}, FUSED),
    ("local width", {"share": 3}, ["few tokens"]),
    ("weight dtype", {"routing": {"weight_dtype": "bfloat16"}}, FUSED),
    ("id dtype", {"routing": {"id_dtype": "int32"}}, ["few tokens"]),
    ("target", {"limits": DeviceLimits("sm_100a", 132)}, ["few tokens", "op by op"]),
]
DOES_NOT: list[tuple[str, dict[str, Any], list[str]]] = [
    ("bound of scratch", {"capacity": {"scratch_bound": 1 << 30}}, EVERYWHERE),
    ("map of experts", {"capacity": {"route_experts": 64}}, EVERYWHERE),
    ("count of its own", {"capacity": {"token_counts": (4096,), "max_tokens": 4096}}, ["many tokens"]),
    ("tokens", {"capacity": {"max_tokens": 6000}}, ["many tokens"]),
    ("tokens", {"capacity": {"max_tokens": 9}}, ["op by op"]),
    ("routes of a token", {"capacity": {"top_k": 3}}, ["many tokens", "op by op"]),
    ("experts", {"layer": {"experts": 65}}, EVERYWHERE),
    ("local width", {"share": 3}, ["many tokens", "op by op"]),
    ("hidden channels", {"layer": {"hidden": 384}}, ["many tokens", "op by op"]),
    ("up divisor", {"layer": {"up_divisor": 128.0}}, EVERYWHERE),
    ("multiprocessors", {"limits": DeviceLimits("sm_90a", 114)}, ["many tokens", "op by op"]),
]


@pytest.mark.parametrize("path", EVERYWHERE)
def test_what_a_generator_reads_changes_the_keys(path: str) -> None:
    plain = keys(path)
    assert plain
    for name, changes, paths in MATTERS:
        if path in paths:
            assert keys(path, **changes) != plain, name


@pytest.mark.parametrize("path", EVERYWHERE)
def test_what_a_launch_is_told_does_not(path: str) -> None:
    plain = keys(path)
    for name, changes, paths in DOES_NOT:
        if path in paths:
            assert keys(path, **changes) == plain, name


def test_rotation_and_io_dtypes_are_apart() -> None:
    """Activations in bfloat16 still meet the weights in float16; no plan has them meet in bfloat16."""
    half, brain = (keys("few tokens", activation={"io_dtype": name}) for name in ("float16", "bfloat16"))
    assert not half & brain
    with pytest.raises(MoeValueError, match="rotation_dtype 'bfloat16' is not float16"):
        keys("few tokens", activation={"io_dtype": "bfloat16", "rotation_dtype": "bfloat16"})


def test_every_key_is_listed_once_and_evaluates_back() -> None:
    layer = make_layer(**BASE | {"rates": ("1", "2.5", "8")})
    law = layer.source.activation
    assert law is not None
    plan = plan_execution(
        plan_weights(layer.source),
        activation=ActivationSpec(nonlinearity=law, io_dtype="float16"),
        capacity=ExecutionCapacity(max_tokens=4096, top_k=2, token_counts=(1, 2, 8, 64)),
        device="cuda",
        limits=HOPPER,
    )
    found = plan.compile_keys()
    assert len(set(found)) == len(found)
    for variant in plan.variants:
        assert variant.fused is not None
    names = {type(key).__name__: type(key) for key in found}
    from trellis_kernels.layers import Tiling

    for key in found:
        assert eval(repr(key), names | {"Activation": Activation, "Tiling": Tiling}) == key
