"""Holds layers to refusing misuse or giving the right result: threads, streams, shared and freed memory, odd tensors.

Every case compares bits with those of an orderly run, so that what is neither refused nor right is seen.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe.samples import Layer, Routes, bits, launch, make_layer, make_plan, make_routes
from trellis_kernels import ColdKernelError, rotate_input
from trellis_kernels.cute import compiler
from trellis_moe import Binding, ExecutionPlan, MoeError, MoeTypeError, MoeValueError, bind, prepare_weights
from trellis_prep import PreparedExperts, PrepStateError

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS, TOP_K = 40, 3
TURNS = 12


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(rates=("3",), hidden=256, intermediate=256)


def prepared(layer: Layer, device: str) -> tuple[ExecutionPlan, PreparedExperts]:
    plan = make_plan(layer, tokens=TOKENS, top_k=TOP_K, device=device)
    return plan, prepare_weights(plan.weights, layer.weights, device=device)


def pair(layer: Layer, device: str, share: str) -> list[Binding]:
    """Two bindings, or one twice, by what they have in common."""
    plan, experts = prepared(layer, device)
    nbytes = plan.required_nbytes()
    arena = torch.empty(2 * nbytes + 512, dtype=torch.uint8, device=device)
    first = bind(plan, experts, arena[:nbytes])
    if share == "the binding":
        return [first, first]
    begin = {"the scratch": 0, "a part of the scratch": 256, "nothing": -(-nbytes // 256) * 256}[share]
    return [first, bind(plan, experts, arena[begin:])]


def inputs(layer: Layer, device: str, seed: int, tokens: int = TOKENS) -> list[torch.Tensor]:
    routes = make_routes(layer, tokens, TOP_K, seed=seed)
    return [tensor.to(device) for tensor in (routes.x, routes.ids, routes.weights)]


def result(binding: Binding, given: list[torch.Tensor]) -> torch.Tensor:
    out = torch.full(given[0].shape, float("nan"), device=given[0].device)
    return binding.run(*given, out=out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", ["the binding", "the scratch", "a part of the scratch", "nothing"])
def test_threads_are_refused_or_right(layer: Layer, device: str, share: str) -> None:
    bindings = pair(layer, device, share)
    given = [inputs(layer, device, seed) for seed in (1, 2)]
    expected = [bits(result(bindings[0], each)) for each in given]
    outcomes: Counter[str] = Counter()
    start = threading.Barrier(2)

    def work(number: int) -> None:
        stream = torch.cuda.Stream() if device == "cuda" else None
        start.wait(30)
        for _ in range(TURNS):
            try:
                with torch.cuda.stream(stream):
                    found = bits(result(bindings[number], given[number]))
                outcomes["right" if found == expected[number] else "wrong"] += 1
            except MoeValueError as error:
                outcomes["refused" if "is in use by a run of thread" in str(error) else str(error)] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes["right"] + outcomes["refused"] == 2 * TURNS, outcomes
    assert outcomes["right"] > 0
    assert share != "nothing" or not outcomes["refused"]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, TOKENS, 300])
@pytest.mark.parametrize("share", ["the binding", "the scratch", "a part of the scratch"])
def test_gpu_streams_that_nobody_orders_are_right(layer: Layer, share: str, tokens: int) -> None:
    plan = make_plan(layer, tokens=300, top_k=TOP_K, device="cuda")
    experts = prepare_weights(plan.weights, layer.weights, device="cuda")
    nbytes = plan.required_nbytes()
    arena = torch.empty(nbytes + 512, dtype=torch.uint8, device="cuda")
    first = bind(plan, experts, arena[:nbytes])
    begin = 256 if share == "a part of the scratch" else 0
    bindings = [first, first if share == "the binding" else bind(plan, experts, arena[begin:])]
    given = [inputs(layer, "cuda", seed, tokens) for seed in (1, 2)]
    expected = [bits(result(first, each)) for each in given]
    outs = [torch.empty(tokens, 256, device="cuda") for _ in given]
    gate, streams = torch.cuda.Stream(), [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(TURNS):
        with torch.cuda.stream(gate):
            torch.cuda._sleep(4_000_000)  # until both runs are given to the device, which then begins them at once
        for stream, binding, each, out in zip(streams, bindings, given, outs, strict=True):
            stream.wait_stream(gate)
            with torch.cuda.stream(stream):
                binding.run(*each, out=out)
        torch.cuda.synchronize()
        assert [bits(out) for out in outs] == expected
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()


@pytest.mark.parametrize("device", DEVICES)
def test_a_binding_keeps_what_it_runs_on(layer: Layer, device: str) -> None:
    plan, experts = prepared(layer, device)
    given = inputs(layer, device, 1)
    binding = bind(plan, experts)
    expected = bits(result(binding, given))
    del plan, experts
    fill_free_memory(device)
    assert bits(result(binding, given)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, TOKENS, 300])
def test_gpu_a_graph_is_right_while_its_binding_lives(layer: Layer, tokens: int) -> None:
    plan = make_plan(layer, tokens=300, top_k=TOP_K, device="cuda")
    binding = bind(plan, prepare_weights(plan.weights, layer.weights, device="cuda"))
    given, out = inputs(layer, "cuda", 1, tokens), torch.empty(tokens, 256, device="cuda")
    expected = bits(result(binding, given))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        binding.run(*given, out=out)
    del plan
    fill_free_memory("cuda")
    out.fill_(float("nan"))
    graph.replay()
    assert bits(out) == expected


def fill_free_memory(device: str) -> None:
    """Give freed memory other content."""
    gc.collect()
    for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        for _ in range(8):
            torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    if device == "cuda":
        torch.cuda.empty_cache()


Change = Callable[[torch.Tensor], torch.Tensor]
ODD: dict[str, tuple[str, Change, type[MoeError] | None]] = {
    "x elsewhere": ("x", lambda x: x.to("meta"), MoeTypeError),
    "ids elsewhere": ("topk_ids", lambda ids: ids.to("meta"), MoeTypeError),
    "weights elsewhere": ("topk_weights", lambda weights: weights.to("meta"), MoeTypeError),
    "out elsewhere": ("out", lambda out: out.to("meta"), MoeTypeError),
    "x in columns": ("x", lambda x: x.t().contiguous().t(), MoeValueError),
    "x with gaps": ("x", lambda x: torch.cat((x, x), 1)[:, : x.shape[1]], MoeValueError),
    "x of one row, repeated": ("x", lambda x: x[:1].expand_as(x), MoeValueError),
    "out of one row, repeated": ("out", lambda out: out[:1].expand_as(out), MoeValueError),
    "ids in columns": ("topk_ids", lambda ids: ids.t().contiguous().t(), MoeValueError),
    "weights with gaps": ("topk_weights", lambda w: torch.cat((w, w), 1)[:, : w.shape[1]], MoeValueError),
    "x of a wider layer": ("x", lambda x: torch.cat((x, x), 1), MoeValueError),
    "more routes than planned": ("topk_ids", lambda ids: torch.cat((ids, ids), 1), MoeValueError),
    "fewer routes than planned": ("topk_ids", lambda ids: ids[:, :1].contiguous(), MoeValueError),
    "fewer weights than tokens": ("topk_weights", lambda weights: weights[1:], MoeValueError),
    "x in float64": ("x", lambda x: x.double(), MoeTypeError),
    "ids in float32": ("topk_ids", lambda ids: ids.float(), MoeTypeError),
    "ids in int16": ("topk_ids", lambda ids: ids.short(), MoeTypeError),
    "x of a list": ("x", lambda x: x.tolist(), MoeTypeError),  # type: ignore[dict-item, return-value]
    "x that wants a gradient": ("x", lambda x: x.clone().requires_grad_(), None),
    "x of a sparse tensor": ("x", lambda x: x.to_sparse(), MoeError),
    "ids far below": ("topk_ids", lambda ids: torch.where(ids < 0, -(2**62), ids), None),
    "ids far above": ("topk_ids", lambda ids: torch.where(ids < 0, 2**62 + 1, ids), None),
    "ids above 32 bits": ("topk_ids", lambda ids: torch.where(ids < 0, 2**32, ids), None),
}  # fmt: skip
"""Name of what is wrong: which tensor, the change, and the error; None where the run is sound and has the same bits."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", ODD)
def test_odd_tensors_are_refused_or_right(layer: Layer, device: str, odd: str) -> None:
    plan, experts = prepared(layer, device)
    binding = bind(plan, experts)
    name, change, kind = ODD[odd]
    x, ids, weights = inputs(layer, device, 1)
    out = torch.full(x.shape, -1.0, device=device)
    expected = bits(result(binding, [x, ids, weights]))
    given = {"x": x, "topk_ids": ids, "topk_weights": weights, "out": out}
    given[name] = change(given[name])
    if kind is None:
        assert bits(binding.run(**given)) == expected
        return
    with pytest.raises(kind):
        binding.run(**given)
    assert bool((out == -1.0).all())  # nothing was launched
    assert bits(result(binding, [x, ids, weights])) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["x", "out"])
@pytest.mark.parametrize("past", [2, 4, 8])
def test_rows_that_begin_anywhere_are_refused_or_right(layer: Layer, device: str, name: str, past: int) -> None:
    plan, experts = prepared(layer, device)
    binding = bind(plan, experts)
    x, ids, weights = inputs(layer, device, 1)
    given = {"x": x, "topk_ids": ids, "topk_weights": weights, "out": torch.empty(x.shape, device=device)}
    expected = bits(binding.run(**given))
    plain = given[name]
    if past % plain.element_size():
        pytest.skip("no tensor of this dtype begins there")
    memory = torch.empty(plain.nbytes + 16, dtype=torch.uint8, device=device)
    given[name] = memory[past : past + plain.nbytes].view(plain.dtype).view(plain.shape).copy_(plain)
    if plan.variants[-1].fused is not None:
        with pytest.raises(MoeValueError, match=f"{name} must begin on a boundary of 16 bytes, got {past} past one"):
            binding.run(**given)
    else:
        assert bits(binding.run(**given)) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [TOKENS + 1, 10 * TOKENS])
def test_more_tokens_than_planned_are_refused(layer: Layer, device: str, tokens: int) -> None:
    plan, experts = prepared(layer, device)
    binding, given = bind(plan, experts), inputs(layer, device, 1, tokens)
    with pytest.raises(MoeValueError, match=f"{tokens} tokens exceed the plan's {TOKENS}"):
        result(binding, given)
    launch(binding, make_routes(layer, TOKENS, TOP_K))


def test_weights_that_change_under_a_binding_change_the_result_and_nothing_else(layer: Layer) -> None:
    plan, experts = prepared(layer, "cpu")
    binding, routes = bind(plan, experts), make_routes(layer, TOKENS, TOP_K)
    before = bits(launch(binding, routes))
    experts.codes.bitwise_not_()
    assert bits(launch(binding, routes)) != before
    experts.codes.bitwise_not_()
    assert bits(launch(binding, routes)) == before


@pytest.mark.gpu
def test_gpu_a_capture_with_a_cold_kernel_is_refused_and_leaves_the_device_sound(layer: Layer) -> None:
    plan, experts = prepared(layer, "cuda")
    binding, routes = bind(plan, experts), make_routes(layer, TOKENS, TOP_K)
    expected = bits(launch(binding, routes))
    x, scales = torch.zeros(4, 512, dtype=torch.bfloat16, device="cuda"), torch.ones(1, 512, device="cuda").half()
    out = torch.empty(4, 512, dtype=torch.float16, device="cuda")
    known = dict(compiler._ready)
    compiler._ready.clear()
    try:
        with (
            pytest.raises(ColdKernelError, match="the stream is being captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            rotate_input(x, scales, out=out)
        with pytest.raises(PrepStateError, match="captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            prepare_weights(plan.weights, layer.weights, device="cuda")
    finally:
        compiler._ready.update(known)
    assert bits(launch(binding, routes)) == expected


@pytest.mark.gpu
def test_gpu_tensors_of_the_host_are_refused(layer: Layer) -> None:
    plan, experts = prepared(layer, "cuda")
    binding = bind(plan, experts)
    given: list[Any] = inputs(layer, "cuda", 1)
    out = torch.empty(given[0].shape, device="cuda")
    for index in range(3):
        for host in (given[index].cpu(), given[index].cpu().pin_memory()):
            changed = [*given[:index], host, *given[index + 1 :]]
            with pytest.raises(MoeTypeError, match="must be on cuda:0, got cpu"):
                binding.run(*changed, out=out)
    with pytest.raises(MoeTypeError, match="out must be on cuda:0, got cpu"):
        binding.run(*given, out=out.cpu())
    with pytest.raises(MoeTypeError, match="scratch must be on cuda:0, got cpu"):
        bind(plan, experts, torch.empty(plan.required_nbytes(), dtype=torch.uint8))
    assert bits(binding.run(*given, out=out)) == bits(launch(binding, Routes(*(each.cpu() for each in given))))
