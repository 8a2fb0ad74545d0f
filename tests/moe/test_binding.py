"""Holds bindings to refusing what was not planned, and to bits that depend on a token's own input alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.samples import (
    LAWS,
    Layer,
    Routes,
    bits,
    distance,
    launch,
    make_binding,
    make_layer,
    make_plan,
    make_routes,
    run,
    truth,
)
from trellis_format.extent import TrellisExtent
from trellis_moe import (
    Binding,
    ExecutionCapacity,
    MoeError,
    MoeTypeError,
    MoeValueError,
    bind,
    plan_execution,
    plan_weights,
    prepare_weights,
)
from trellis_prep import even_extents

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("1", "2.5", "4", "8"), biased=True, hidden=200, intermediate=320)


@pytest.fixture(scope="module")
def binding(layer: Layer) -> Binding:
    return make_binding(layer, make_plan(layer, tokens=9, top_k=3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [0, 1, 7, 9])
def test_any_count_up_to_the_plan_matches_the_reference(layer: Layer, tokens: int, device: str) -> None:
    binding = make_binding(layer, make_plan(layer, tokens=9, top_k=3, device=device))
    routes = make_routes(layer, 9, 3).part(slice(0, tokens))
    found = launch(binding, routes)
    assert found.shape == (tokens, 200)
    assert not tokens or distance(found, truth(layer, routes)) <= 1e-3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("fill", [0x00, 0xFF, 0x7E])
def test_what_scratch_held_does_not_matter(layer: Layer, fill: int, device: str) -> None:
    plan, routes = make_plan(layer, tokens=9, top_k=3, device=device), make_routes(layer, 5, 3)
    ones = make_binding(layer, plan, fill=0x3C)  # 0xFF.. and 0x7E7E are NaN in float16, 0x3C3C is about 1
    assert bits(launch(make_binding(layer, plan, fill=fill), routes)) == bits(launch(ones, routes))


@pytest.mark.parametrize("device", DEVICES)
def test_runs_repeat_bit_for_bit(layer: Layer, device: str) -> None:
    binding = make_binding(layer, make_plan(layer, tokens=9, top_k=3, device=device))
    first, other = make_routes(layer, 9, 3, seed=1), make_routes(layer, 4, 3, seed=2)
    expected = bits(launch(binding, first))
    for routes in (first, other, first, other.part(slice(0, 0)), first):
        found = bits(launch(binding, routes))
        assert routes is not first or found == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_token_has_the_same_bits_alone_and_among_others(layer: Layer, dtype: torch.dtype, device: str) -> None:
    routes = make_routes(layer, 41, 3, dtype=dtype)
    binding = make_binding(layer, make_plan(layer, tokens=41, top_k=3, dtype=dtype, device=device))
    together = launch(binding, routes)
    order = torch.randperm(41, generator=torch.Generator().manual_seed(3))
    assert bits(launch(binding, routes.part(order))) == bits(together[order])
    for token in (0, 17, 40):
        alone = launch(binding, routes.part(slice(token, token + 1)))
        assert bits(alone) == bits(together[token : token + 1])


def test_threads_change_no_bit(layer: Layer, binding: Binding) -> None:
    routes, found = make_routes(layer, 9, 3), []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(bits(launch(binding, routes)))
    torch.set_num_threads(1)
    assert len(set(found)) == 1


def test_a_larger_plan_changes_no_bit(layer: Layer, binding: Binding) -> None:
    routes = make_routes(layer, 6, 3)
    larger = make_binding(layer, make_plan(layer, tokens=500, top_k=3))
    assert larger.plan.variants[-1].block_rows != binding.plan.variants[-1].block_rows
    assert bits(launch(larger, routes)) == bits(launch(binding, routes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("nobody", [-1, -2, 5, 6, 1 << 31, -(1 << 62)])
@pytest.mark.parametrize("weight", [1.0, float("nan"), float("inf")])
def test_an_id_that_is_no_expert_adds_exactly_nothing(layer: Layer, nobody: int, weight: float, device: str) -> None:
    routes = make_routes(layer, 9, 3)
    routes.ids.clamp_(min=0)
    dropped = torch.arange(27).view(9, 3) % 4 == 0
    ids, weights = routes.ids.masked_fill(dropped, nobody), routes.weights.masked_fill(dropped, weight)
    found = run(layer, Routes(routes.x, ids, weights), device=device)
    plain = run(layer, Routes(routes.x, routes.ids, routes.weights.masked_fill(dropped, 0.0)), device=device)
    assert bits(found) == bits(plain)


@pytest.mark.parametrize("nobody", [-1, 5])
def test_tokens_without_an_expert_are_exact_zeros(layer: Layer, nobody: int) -> None:
    routes = make_routes(layer, 9, 3)
    routes.ids[4:7] = nobody
    routes.x[5] = float("nan")
    found = run(layer, routes)
    assert bits(found[4:7]) == bytes(3 * 200 * 4)
    assert torch.isfinite(found).all()
    routes.ids[:] = nobody
    assert bits(run(layer, routes)) == bytes(9 * 200 * 4)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_token_that_overflows_spoils_no_other(layer: Layer, value: float) -> None:
    routes = make_routes(layer, 9, 3)
    clean = run(layer, routes)
    routes.x[4, 17:60] = value
    routes.ids[4] = torch.tensor([0, 1, 2])
    found = run(layer, routes)
    others = [token for token in range(9) if token != 4]
    assert bits(found[others]) == bits(clean[others])
    assert not torch.isfinite(found[4]).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_ids_and_weights_of_each_dtype_give_the_same_bits(
    layer: Layer, binding: Binding, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    routes = make_routes(layer, 9, 3)
    weights = (torch.arange(27).view(9, 3) % 8 / 8).to(torch.float32)  # exact in each dtype
    expected = launch(binding, Routes(routes.x, routes.ids, weights))
    found = launch(binding, Routes(routes.x, routes.ids.to(dtype), weights.to(weight_dtype)))
    assert bits(found) == bits(expected)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_outputs_of_each_dtype_are_one_rounding_away(layer: Layer, name: str) -> None:
    routes = make_routes(layer, 9, 3)
    found, exact = run(layer, routes, output_dtype=name), run(layer, routes)
    assert bits(found) == bits(exact.to(getattr(torch, name)))


def test_one_expert_many_times_counts_each_time(layer: Layer) -> None:
    x = make_routes(layer, 3, 1).x
    once = run(layer, Routes(x, torch.full((3, 1), 2), torch.full((3, 1), 2.0)))
    twice = run(layer, Routes(x, torch.full((3, 2), 2), torch.ones(3, 2)))
    assert bits(once) == bits(twice)


def test_parameters_and_gradients_leave_scratch_alone(layer: Layer, binding: Binding) -> None:
    routes = make_routes(layer, 4, 3)
    expected = bits(launch(binding, routes))
    routes.x.requires_grad_()
    for _ in range(2):
        found = launch(binding, routes)
        assert bits(found) == expected
        assert not found.requires_grad


def test_the_sum_of_the_shares_is_the_whole(layer: Layer) -> None:
    routes = make_routes(layer, 9, 3)
    whole = run(layer, routes)
    for world_size in (1, 2, 3):
        parts = [run(layer, routes, extent=extent) for extent in even_extents(384, world_size)]
        assert distance(torch.stack(parts).double().sum(0), whole) <= 1e-6
        for part, extent in zip(parts, even_extents(384, world_size), strict=True):
            assert distance(part, truth(layer, routes, extent=extent)) <= 1e-3


def test_an_empty_share_gives_exact_zeros(layer: Layer) -> None:
    extent = TrellisExtent(global_intermediate_size=384, first_slot=0, slot_count=0)
    assert bits(run(layer, make_routes(layer, 5, 3), extent=extent)) == bytes(5 * 200 * 4)


def test_progress_reaches_its_end(layer: Layer, binding: Binding) -> None:
    routes, seen = make_routes(layer, 4, 3), list[tuple[int, int]]()
    binding.run(routes.x, routes.ids, routes.weights, out=torch.empty(4, 200), progress=lambda *step: seen.append(step))
    assert seen == [(step, 4) for step in (1, 2, 3, 4)]


def inputs(layer: Layer, **changes: Any) -> dict[str, Any]:
    routes = make_routes(layer, 4, 3)
    plain = {"x": routes.x, "topk_ids": routes.ids, "topk_weights": routes.weights, "out": torch.full((4, 200), -1.0)}
    return plain | changes


REFUSED: list[tuple[dict[str, Any], type[MoeError], tuple[str, ...]]] = [
    ({"x": torch.zeros(4, 200)}, MoeTypeError, ("x must be torch.float16", "torch.float32")),
    ({"x": [[0.0]]}, MoeTypeError, ("x must be a Tensor", "list")),
    ({"x": torch.zeros((), dtype=torch.float16)}, MoeValueError, ("x must have two axes, [tokens, 200]", "got []")),
    ({"x": torch.zeros(4, 256, dtype=torch.float16)}, MoeValueError, ("x must be [4, 200]", "got [4, 256]")),
    ({"x": torch.zeros(200, 4, dtype=torch.float16).T}, MoeValueError, ("x must be contiguous", "(1, 4)")),
    ({"x": torch.zeros(4, 200, dtype=torch.float16, device="meta")}, MoeTypeError, ("x must be on cpu", "meta")),
    ({"topk_ids": torch.zeros(4, 3)}, MoeTypeError, ("topk_ids must be torch.int32 or torch.int64", "torch.float32")),
    ({"topk_ids": torch.zeros(4, 2, dtype=torch.int64)}, MoeValueError, ("topk_ids must be [4, 3]", "got [4, 2]")),
    ({"topk_ids": torch.zeros(3, 3, dtype=torch.int64)}, MoeValueError, ("topk_ids must be [4, 3]", "got [3, 3]")),
    ({"topk_ids": None}, MoeTypeError, ("topk_ids must be a Tensor", "NoneType")),
    ({"topk_weights": torch.zeros(4, 3, dtype=torch.float64)}, MoeTypeError, ("topk_weights must be", "torch.float64")),
    ({"topk_weights": torch.zeros(4, 4)}, MoeValueError, ("topk_weights must be [4, 3]", "got [4, 4]")),
    ({"topk_weights": torch.zeros(4, 6)[:, ::2]}, MoeValueError, ("topk_weights must be contiguous", "(6, 2)")),
    ({"out": torch.zeros(4, 200, dtype=torch.float16)}, MoeTypeError, ("out must be torch.float32", "torch.float16")),
    ({"out": torch.zeros(3, 200)}, MoeValueError, ("out must be [4, 200]", "got [3, 200]")),
    ({"out": torch.zeros(4, 400)[:, :200]}, MoeValueError, ("out must be contiguous", "(400, 1)")),
]


@pytest.mark.parametrize(("changes", "kind", "parts"), REFUSED)
def test_what_was_not_planned_is_refused_before_the_launch(
    layer: Layer, binding: Binding, changes: dict[str, Any], kind: type[MoeError], parts: tuple[str, ...]
) -> None:
    arguments = inputs(layer, **changes)
    with pytest.raises(kind) as caught:
        binding.run(**arguments)
    assert all(part in str(caught.value) for part in parts), caught.value
    if "out" not in changes:
        assert (arguments["out"] == -1.0).all()


def test_more_tokens_than_planned_are_refused(layer: Layer, binding: Binding) -> None:
    routes = make_routes(layer, 10, 3)
    with pytest.raises(MoeValueError, match="10 tokens exceed the plan's 9"):
        launch(binding, routes)


def test_tensors_that_overlap_are_refused(layer: Layer) -> None:
    plan = replace(make_plan(layer, tokens=9, top_k=3, dtype=torch.float32))
    experts = prepare_weights(plan.weights, layer.weights)
    arena = torch.zeros(plan.required_nbytes() + 4 * 200 * 4, dtype=torch.uint8)
    binding = bind(plan, experts, arena)
    x = torch.zeros(4, 200)
    inside = arena[-4 * 200 * 4 - 16 : -16].view(torch.float32).view(4, 200)
    beyond = arena[plan.required_nbytes() :].view(torch.float32).view(4, 200)
    for changes in ({"x": inside}, {"out": inside, "x": x}):
        with pytest.raises(MoeValueError, match=r"at bytes \d+\.\.\d+ overlaps scratch at \d+\.\.\d+"):
            binding.run(**inputs(layer, **changes))
    with pytest.raises(MoeValueError, match=r"out at bytes .* overlaps x at"):
        binding.run(**inputs(layer, x=x, out=x))
    binding.run(**inputs(layer, x=x, out=beyond))  # bytes of the arena that the plan does not need are free


def test_weights_of_another_share_or_layer_are_refused(layer: Layer) -> None:
    plan = make_plan(layer, extent=even_extents(384, 3)[0])
    other = prepare_weights(make_plan(layer, extent=even_extents(384, 3)[1]).weights, layer.weights)
    with pytest.raises(MoeValueError, match=r"first_slot=4.*first_slot=0"):
        bind(plan, other)
    foreign = make_layer(codebook="mcg", hidden=200, intermediate=320)
    experts = prepare_weights(make_plan(foreign).weights, foreign.weights)
    with pytest.raises(MoeValueError, match="another layer than the plan: codebook 'mcg' against 'mul1'"):
        bind(make_plan(layer), experts)


def test_weights_or_scratch_elsewhere_are_refused(layer: Layer) -> None:
    experts = prepare_weights(make_plan(layer).weights, layer.weights)
    with pytest.raises(MoeTypeError, match="the plan is for cuda, the weights are on cpu"):
        bind(make_plan(layer, device="cuda"), experts)
    plan = make_plan(layer)
    scratch = torch.empty(plan.required_nbytes(), dtype=torch.uint8, device="meta")
    with pytest.raises(MoeTypeError, match="scratch must be on cpu, got meta"):
        bind(plan, experts, scratch)
    short = torch.empty(plan.required_nbytes() - 1, dtype=torch.uint8)
    with pytest.raises(MoeValueError, match=f"{plan.required_nbytes() - 1} bytes, the plan needs {short.numel() + 1}"):
        bind(plan, experts, short)
    for arguments, words in (
        ((plan.weights, experts), "plan must be an ExecutionPlan, got WeightPlan"),
        ((plan, layer.weights), "experts must be a PreparedExperts, got TrellisWeights"),
        ((plan, experts, 4096), "scratch must be a Tensor, got int"),
    ):
        with pytest.raises(MoeTypeError, match=words):
            bind(*arguments)


def test_scratch_is_made_where_none_is_given(layer: Layer, binding: Binding) -> None:
    experts = prepare_weights(binding.plan.weights, layer.weights)
    routes = make_routes(layer, 9, 3)
    assert bits(launch(bind(binding.plan, experts), routes)) == bits(launch(binding, routes))


def test_bindings_may_share_one_arena_in_turn(layer: Layer) -> None:
    other = make_layer(activation=LAWS[5], intermediate=256, rates=("2",))
    plans = [make_plan(layer, tokens=9, top_k=3), make_plan(other, tokens=9, top_k=3)]
    arena = torch.empty(max(plan.required_nbytes() for plan in plans), dtype=torch.uint8)
    pairs = [(layer, plans[0]), (other, plans[1])]
    bindings = [bind(plan, prepare_weights(plan.weights, each.weights), arena) for each, plan in pairs]
    for _ in range(2):
        for (each, plan), binding in zip(pairs, bindings, strict=True):
            routes = make_routes(each, 9, 3)
            assert bits(launch(binding, routes)) == bits(launch(make_binding(each, plan), routes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens", [4, 60])
def test_an_expert_map_names_the_ranks_experts(layer: Layer, map_dtype: torch.dtype, tokens: int, device: str) -> None:
    globals_ = torch.tensor([-1, 4, 2, -1, 0, 1, 3, -1, 2, -7, 5, 1 << 20], dtype=map_dtype)
    ids = torch.randint(-2, 14, (tokens, 3), generator=torch.Generator().manual_seed(7))
    known = ids.clamp(0, 11)
    local = torch.where((ids < 0) | (ids > 11), -1, globals_.long()[known])
    local = torch.where((local < 0) | (local > 4), -1, local)
    routes = make_routes(layer, tokens, 3)
    plan = make_plan(layer, tokens=60, top_k=3, device=device)
    expected = launch(make_binding(layer, plan), Routes(routes.x, local, routes.weights))
    experts = prepare_weights(plan.weights, layer.weights, device=device)
    mapped = bind(plan, experts, expert_map=globals_.to(device))
    assert bits(launch(mapped, Routes(routes.x, ids, routes.weights))) == bits(expected)
    assert distance(expected, truth(layer, Routes(routes.x, local, routes.weights))) <= 1e-3
    mapped.expert_map.fill_(-1)  # type: ignore[union-attr]
    assert bits(launch(mapped, Routes(routes.x, ids, routes.weights))) == bytes(tokens * 200 * 4)


def test_an_expert_map_of_another_length_dtype_or_shape_is_refused(layer: Layer) -> None:
    capacity = ExecutionCapacity(max_tokens=4, top_k=3, route_experts=8)
    spec = make_plan(layer).activation
    plan = plan_execution(plan_weights(layer.source), activation=spec, capacity=capacity)
    assert "ids of 8 experts through a map" in plan.explain()
    experts = prepare_weights(plan.weights, layer.weights)
    bind(plan, experts, expert_map=torch.zeros(8, dtype=torch.int32))
    for given, kind, words in (
        (None, MoeValueError, "ids are of 8 experts; a binding needs an expert map of that length"),
        (torch.zeros(9, dtype=torch.int32), MoeValueError, "has 9 experts, the plan's ids are of 8"),
        (torch.zeros(8), MoeTypeError, "int32 or torch.int64, got torch.float32"),
        (torch.zeros(16, dtype=torch.int32)[::2], MoeValueError, "one contiguous axis"),
        (torch.zeros(2, 4, dtype=torch.int32), MoeValueError, r"one contiguous axis.*\[2, 4\]"),
        (torch.zeros(0, dtype=torch.int32), MoeValueError, "at least one expert"),
        (torch.zeros(8, dtype=torch.int32, device="meta"), MoeTypeError, "must be on cpu, got meta"),
        ([0] * 8, MoeTypeError, "expert_map must be a Tensor, got list"),
    ):
        with pytest.raises(kind, match=words):
            bind(plan, experts, expert_map=given)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", DEVICES)
def test_runs_take_the_launch_of_their_count_and_count_it(layer: Layer, device: str) -> None:
    capacity = ExecutionCapacity(max_tokens=200, top_k=3, token_counts=(1, 8))
    plan = plan_execution(
        plan_weights(layer.source), activation=make_plan(layer).activation, capacity=capacity, device=device
    )
    binding = make_binding(layer, plan)
    assert binding.counters == {1: 0, 8: 0, 200: 0}
    for tokens in (1, 2, 8, 9, 200, 1):
        routes = make_routes(layer, tokens, 3)
        assert distance(launch(binding, routes), truth(layer, routes)) <= 1e-3
    assert binding.counters == {1: 2, 8: 2, 200: 2}


@pytest.mark.parametrize("tokens", [1, 6, 7, 20, 41])
def test_a_run_that_is_cut_has_the_bits_of_one_launch(layer: Layer, tokens: int) -> None:
    whole = make_plan(layer, tokens=41, top_k=3)
    capacity = ExecutionCapacity(max_tokens=41, top_k=3, scratch_bound=whole.required_nbytes() // 6)
    plan = plan_execution(plan_weights(layer.source), activation=whole.activation, capacity=capacity)
    assert plan.direct_token_capacity == 6
    routes, seen = make_routes(layer, tokens, 3), list[tuple[int, int]]()
    binding = make_binding(layer, plan)
    out = torch.full((tokens, 200), float("nan"))
    binding.run(routes.x, routes.ids, routes.weights, out=out, progress=lambda *step: seen.append(step))
    assert bits(out) == bits(launch(make_binding(layer, whole), routes))
    assert binding.counters == {6: -(-tokens // 6)}
    assert seen == sorted(seen)
    assert seen[-1] in {(4, 4), (4 * tokens, 4 * tokens)}
