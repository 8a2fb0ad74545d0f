"""Holds bindings to CUDA graphs: every launch captured once, then replayed over inputs that change in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moe.samples import LAWS, Layer, Routes, bits, distance, launch, make_layer, make_routes, truth
from trellis_moe import (
    ActivationSpec,
    Binding,
    ExecutionCapacity,
    MoeError,
    MoeTypeError,
    MoeValueError,
    RoutingSpec,
    Session,
    bind,
    plan_execution,
    plan_weights,
    prepare_weights,
)

pytestmark = pytest.mark.gpu

COUNTS = (1, 8, 24, 40)
LIVE = (1, 3, 8, 17, 24, 40, 299, 300)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("3",))


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session()
    yield session
    session.thaw()


def make(layer: Layer, arena: torch.Tensor | None = None, **capacity: Any) -> Binding:
    """A binding on the GPU for up to 300 tokens, with launches of their own for `COUNTS`."""
    law = layer.source.activation
    assert law is not None
    plan = plan_execution(
        plan_weights(layer.source),
        activation=ActivationSpec(nonlinearity=law, io_dtype="float16"),
        capacity=ExecutionCapacity(**{"max_tokens": 300, "top_k": 2, "token_counts": COUNTS} | capacity),
        device="cuda",
    )
    assert all(variant.capturable for variant in plan.variants)
    experts = prepare_weights(plan.weights, layer.weights, device="cuda")
    scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8, device="cuda") if arena is None else arena
    return bind(plan, experts, scratch)


class Captured:
    """A graph of one run, with the tensors that it reads and writes."""

    def __init__(self, binding: Binding, routes: Routes, pool: Any = None) -> None:
        self.inputs = [tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)]
        self.out = torch.full(routes.x.shape, float("nan"), device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            binding.run(*self.inputs, out=self.out)

    def replay(self, routes: Routes) -> torch.Tensor:
        """The output for other inputs, over a poisoned one."""
        for mine, given in zip(self.inputs, (routes.x, routes.ids, routes.weights), strict=True):
            mine.copy_(given)
        self.out.fill_(float("nan"))
        self.graph.replay()
        return self.out.cpu()


def test_gpu_every_launch_replays_over_inputs_that_change_in_place(layer: Layer) -> None:
    binding = make(layer)
    scratch = binding._scratch
    for tokens in LIVE:
        graph = Captured(binding, make_routes(layer, tokens, 2))
        for seed in (2, 3):
            routes = make_routes(layer, tokens, 2, seed=seed)
            routes.ids[0, 0] = 0
            scratch.fill_(0xFF if seed == 2 else 0x7E)
            found = graph.replay(routes)
            assert bits(found) == bits(launch(binding, routes)), tokens
            assert distance(found, truth(layer, routes)) <= 1e-3, tokens
    assert all(binding.counters.values())


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_gpu_ten_thousand_replays_repeat_bit_for_bit(layer: Layer, tokens: int) -> None:
    binding, sets = make(layer), [make_routes(layer, tokens, 2, seed=seed) for seed in (6, 7)]
    graph = Captured(binding, sets[0])
    expected = [graph.replay(routes).cuda().view(torch.int32) for routes in sets]
    inputs = [[tensor.cuda() for tensor in (routes.x, routes.ids, routes.weights)] for routes in sets]
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(10_000):
        if step % 64 == 0:  # other inputs in the same places, and what the last runs left in the scratch is gone
            for mine, given in zip(graph.inputs, inputs[step // 64 % 2], strict=True):
                mine.copy_(given)
            binding._scratch.fill_(0xFF)
        graph.out.fill_(float("nan"))
        graph.graph.replay()
        changed += graph.out.view(torch.int32).ne(expected[step // 64 % 2]).sum()
    assert int(changed) == 0
    assert not torch.equal(*expected)


def test_gpu_layers_share_a_pool_and_an_arena(layer: Layer) -> None:
    layers = [layer, make_layer(rates=("2",), activation=LAWS[4], seed=5), make_layer(codebook="mcg", rates=("4",))]
    arena = torch.empty(max(make(each).plan.required_nbytes() for each in layers), dtype=torch.uint8, device="cuda")
    pool = torch.cuda.graph_pool_handle()
    bindings = [make(each, arena) for each in layers]
    graphs = [
        [Captured(binding, make_routes(each, tokens, 2), pool) for tokens in (3, 300)]
        for each, binding in zip(layers, bindings, strict=True)
    ]
    for seed in (4, 5):
        for each, binding, pair in zip(layers, bindings, graphs, strict=True):
            for graph, tokens in zip(pair, (3, 300), strict=True):
                routes = make_routes(each, tokens, 2, seed=seed)
                assert bits(graph.replay(routes)) == bits(launch(binding, routes))


def test_gpu_a_run_allocates_nothing_waits_for_nothing_and_compiles_nothing(layer: Layer, session: Session) -> None:
    binding = make(layer)
    session.prepare([binding.plan])
    count = session.kernel_count
    inputs = {tokens: [t.cuda() for t in vars(make_routes(layer, tokens, 2)).values()] for tokens in LIVE}
    outs = {tokens: torch.empty(tokens, 256, device="cuda") for tokens in LIVE}
    for tokens in LIVE:
        binding.run(*inputs[tokens], out=outs[tokens])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tokens in LIVE:
            binding.run(*inputs[tokens], out=outs[tokens])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert session.kernel_count == count


@pytest.mark.parametrize(("tokens", "share"), [(40, 0.3), (4000, 0.8)], ids=["few", "many"])
def test_gpu_a_run_that_is_cut_replays_as_one_graph(layer: Layer, tokens: int, share: float) -> None:
    """Cut by the plan, or inside the launch for many tokens, whose bits do not depend on it."""
    whole = make(layer, token_counts=(), max_tokens=tokens)
    bound = int(whole.plan.required_nbytes() * share)
    cut = make(layer, token_counts=(), max_tokens=tokens, scratch_bound=bound)
    assert cut.plan.required_nbytes() <= bound
    routes = make_routes(layer, tokens, 2)
    found = Captured(cut, make_routes(layer, tokens, 2, seed=9)).replay(routes)
    assert sum(cut.counters.values()) == len(cut.plan.cut(tokens))
    assert distance(found, launch(whole, routes)) <= 1e-3
    assert tokens == 40 or bits(found) == bits(launch(whole, routes))


def test_gpu_other_tensors_are_refused_before_a_launch(layer: Layer) -> None:
    binding = make(layer)
    routes = make_routes(layer, 4, 2)
    plain: dict[str, torch.Tensor] = {
        "x": routes.x.cuda(), "topk_ids": routes.ids.cuda(), "topk_weights": routes.weights.cuda(),
        "out": torch.full((4, 256), -1.0, device="cuda"),
    }  # fmt: skip
    refused: list[tuple[str, torch.Tensor, type[MoeError], str]] = [
        ("x", routes.x, MoeTypeError, "x must be on cuda:0, got cpu"),
        ("x", routes.x.cuda().bfloat16(), MoeTypeError, "x must be torch.float16, got torch.bfloat16"),
        ("x", torch.zeros(4, 512, dtype=torch.float16, device="cuda")[:, ::2], MoeValueError, "x must be contiguous"),
        ("topk_ids", routes.ids.int().cuda(), MoeTypeError, "topk_ids must be torch.int64, got torch.int32"),
        ("topk_weights", routes.weights.half().cuda(), MoeTypeError, "topk_weights must be torch.float32"),
        ("topk_ids", torch.zeros(4, 3, dtype=torch.int64, device="cuda"), MoeValueError, r"topk_ids must be \[4, 2\]"),
        ("x", torch.zeros(301, 256, dtype=torch.float16, device="cuda"), MoeValueError, "must be"),
        ("x", binding._scratch[: 4 * 512].view(torch.float16).view(4, 256), MoeValueError, "overlaps scratch"),
    ]
    for name, tensor, kind, words in refused:
        with pytest.raises(kind, match=words):
            binding.run(**{**plain, name: tensor})
    assert (plain["out"] == -1.0).all()


def test_gpu_routes_added_in_the_order_of_arrival_are_near_the_ordered_sum(layer: Layer) -> None:
    law, routes = layer.source.activation, make_routes(layer, 300, 2, dtype=torch.bfloat16)
    assert law is not None
    found = {}
    for ordered in (True, False):
        plan = plan_execution(
            plan_weights(layer.source),
            activation=ActivationSpec(nonlinearity=law, io_dtype="bfloat16", output_dtype="bfloat16"),
            capacity=ExecutionCapacity(max_tokens=300, top_k=2, token_counts=(8,)),
            routing=RoutingSpec(deterministic_output=ordered),
            device="cuda",
        )
        assert plan.reduction == ("ordered" if ordered else "atomic")
        binding = bind(plan, prepare_weights(plan.weights, layer.weights, device="cuda"))
        found[ordered] = launch(binding, routes).double()
        few = routes.part(slice(0, 8))
        assert bits(launch(binding, few)) == bits(launch(binding, few))
    similarity = torch.nn.functional.cosine_similarity(found[False].flatten(), found[True].flatten(), dim=0)
    assert similarity >= 0.99999
    assert distance(found[False], truth(layer, routes)) <= 8e-3


def test_gpu_the_reference_backend_runs_on_the_same_api(layer: Layer) -> None:
    law, routes = layer.source.activation, make_routes(layer, 9, 2)
    assert law is not None
    plan = plan_execution(
        plan_weights(layer.source),
        activation=ActivationSpec(nonlinearity=law, io_dtype="float16"),
        capacity=ExecutionCapacity(max_tokens=9, top_k=2),
        device="cuda",
        reference=True,
    )
    assert plan.compile_keys() == ()
    binding = bind(plan, prepare_weights(plan.weights, layer.weights, device="cuda"))
    assert distance(launch(binding, routes), truth(layer, routes)) <= 1e-3
