"""Holds the dispatch of ops to backends: who runs, what is refused, and that arguments arrive as they were given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

import trellis_kernels
from kernel_cases import as_bits, poisoned, random_bank, random_codes
from trellis_format.activations import Activation
from trellis_format.rates import Rate
from trellis_kernels import BACKENDS, OPS, KernelUnsupportedError, KernelValueError, ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
HAS_DSL = find_spec("cutlass") is not None


@pytest.mark.parametrize("op", OPS)
def test_every_op_is_public_and_has_a_readable_backend(op: str) -> None:
    public = getattr(trellis_kernels, op)
    assert public is getattr(ops, op)
    wanted = [name for name in inspect.signature(public).parameters if name != "backend"]
    for backend in ops._IMPLEMENTATIONS[op]:
        if backend == "cute" and not HAS_DSL:
            continue
        found = inspect.signature(ops.implementation(op, backend)).parameters
        assert list(found) == wanted, backend
    assert "cpu" in ops._IMPLEMENTATIONS[op]


@pytest.mark.parametrize("op", OPS)
def test_kernels_run_on_cuda_and_torch_elsewhere(op: str) -> None:
    assert ops.backend_for(op, CPU) == "cpu"
    assert ops.backend_for(op, torch.device("meta")) == "cpu"
    assert ops.backend_for(op, CUDA) == ("cute" if "cute" in ops._IMPLEMENTATIONS[op] else "cpu")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(KernelValueError, match=r"unknown op 'transpose'; known: decode"):
        ops.backend_for("transpose", CPU)
    with pytest.raises(KernelValueError, match=r"unknown op 'transpose'"):
        ops.implementation("transpose", "cpu")
    with pytest.raises(KernelValueError, match=rf"unknown backend 'triton'; known: {', '.join(BACKENDS)}"):
        ops.implementation("decode", "triton")


def test_missing_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops._IMPLEMENTATIONS, "activate", {"cpu": "trellis_kernels.cpu.activate"})
    with pytest.raises(KernelUnsupportedError, match="op activate has no cute backend; it has: cpu"):
        ops.implementation("activate", "cute")
    assert ops.backend_for("activate", CUDA) == "cpu"


def arguments() -> dict[str, tuple[tuple[object, ...], dict[str, object]]]:
    """A legal call of every op."""
    torch.manual_seed(3)
    bank, _ = random_bank("mcg", [Rate.of(2), Rate.of(5)], 128, 128)
    ids = torch.tensor([[0, 1], [1, -1], [1, 0]], dtype=torch.int32)
    packed = ops.pack_routes(ids, num_experts=2, block_rows=8)
    rows, scales = torch.randn(6, 128), torch.randn(2, 128).half()
    codes = torch.from_numpy(random_codes(1, 2, rate=Rate.of(3)))
    return {
        "decode": ((codes,), {"codebook": "mul1", "rate": Rate.of(3), "out": poisoned(16, 32)}),
        "rotate_input": (
            (torch.randn(3, 100), scales),
            {"rows": torch.tensor([2, 0]), "tables": torch.tensor([1, -1]), "out": poisoned(2, 128)},
        ),
        "rotate_output": (
            (rows, scales),
            {"tables": torch.arange(6) % 2, "bias": torch.randn(2, 128).half(), "out": poisoned(6, 128)},
        ),
        "activate": ((rows, rows.flip(0)), {"activation": Activation("silu"), "out": poisoned(6, 128)}),
        "pack_routes": (
            (ids,),
            {"num_experts": 1, "block_rows": 16, "expert_map": torch.tensor([-1, 0], dtype=torch.int32)},
        ),
        "grouped_gemm": ((rows.half(), bank, packed), {"out": poisoned(6, 128)}),
        "reduce_routes": ((rows, torch.rand(3, 2)), {"factor": 128.0, "out": poisoned(3, 100)}),
    }


def tensors_of(result: object) -> list[torch.Tensor]:
    """The tensors of a result, which is one or a record of several."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in vars(result).values() if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("op", OPS)
def test_a_call_is_its_backends_call(op: str) -> None:
    positional, keywords = arguments()[op]
    direct = ops.implementation(op, "cpu")(*positional, **keywords)
    wanted = [as_bits(tensor).copy() for tensor in tensors_of(direct)]
    positional, keywords = arguments()[op]
    found = getattr(ops, op)(*positional, **keywords)
    if "out" in keywords:
        assert found is keywords["out"]
        assert not torch.isnan(found).any()
    assert [bits.tolist() for bits in map(as_bits, tensors_of(found))] == [bits.tolist() for bits in wanted]


@pytest.mark.parametrize("op", OPS)
def test_a_named_backend_is_taken(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    def stand_in(name: str) -> SimpleNamespace:
        return SimpleNamespace(**{op: lambda *given, **keywords: seen.append((name, keywords))})

    positional, keywords = arguments()[op]
    monkeypatch.setitem(ops._IMPLEMENTATIONS, op, {"cpu": "stand.in.cpu", "cute": "stand.in.cute"})
    monkeypatch.setattr(ops, "importlib", SimpleNamespace(import_module=stand_in))
    for backend, wanted in (("cute", "stand.in.cute"), ("cpu", "stand.in.cpu"), (None, "stand.in.cpu")):
        getattr(ops, op)(*positional, **keywords, backend=backend)
        assert seen[-1][0] == wanted
        assert all(seen[-1][1][name] is value for name, value in keywords.items())


def kernel_calls() -> dict[str, tuple[Callable[[torch.Tensor], object], torch.Tensor]]:
    """Calls whose bits are fixed of every op that has a kernel, on many thread blocks, and their outputs.

    Unordered packing puts one route on an expert, and the atomic sum adds two terms, so that no order shows.
    """
    torch.manual_seed(5)

    def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype)

    rows, scales, weights = filled(700, 1408), filled(2, 1408, dtype=torch.float16), filled(350, 2)
    tables = torch.arange(700, device="cuda") % 2
    ids = torch.randint(-1, 256, (4096, 8), device="cuda")
    once = torch.randperm(256, device="cuda").view(32, 8)
    codes = torch.randint(-(2**15), 2**15, (40, 70, 48), dtype=torch.int16, device="cuda")
    sums, nothing = filled(350, 1408), torch.empty(0, device="cuda")
    return {
        "decode": (lambda out: ops.decode(codes, codebook="mul1", rate=Rate.of(3), out=out), filled(640, 1120)),
        "rotate_input": (
            lambda out: ops.rotate_input(rows, scales, tables=tables, out=out),
            filled(700, 1408, dtype=torch.float16),
        ),
        "rotate_output": (lambda out: ops.rotate_output(rows, scales, tables=tables, out=out), filled(700, 1408)),
        "activate": (
            lambda out: ops.activate(rows, rows.flip(0), activation=Activation("silu"), out=out),
            filled(700, 1408),
        ),
        "pack_routes": (lambda _: ops.pack_routes(ids, num_experts=256, block_rows=64), nothing),
        "pack_routes unordered": (
            lambda _: ops.pack_routes(once, num_experts=256, block_rows=8, stable=False),
            nothing,
        ),
        "reduce_routes": (lambda out: ops.reduce_routes(rows, weights, out=out), filled(350, 1408)),
        "reduce_routes atomic": (
            lambda out: ops.reduce_routes(rows, weights, accumulator=sums, out=out),
            filled(350, 1408, dtype=torch.float16),
        ),
    }


KERNEL_CALLS = (
    "decode", "rotate_input", "rotate_output", "activate", "pack_routes", "pack_routes unordered", "reduce_routes",
    "reduce_routes atomic",
)  # fmt: skip


def poison(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -77)


def copies(tensors: list[torch.Tensor]) -> list[npt.NDArray[np.uint8]]:
    return [as_bits(tensor).copy() for tensor in tensors]


def test_every_op_that_has_a_kernel_is_called() -> None:
    assert {name.split()[0] for name in KERNEL_CALLS} == {op for op in OPS if "cute" in ops._IMPLEMENTATIONS[op]}


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_gpu_a_hundred_calls_give_the_same_bits(name: str) -> None:
    call, out = kernel_calls()[name]
    poison([out])
    first = copies(tensors_of(call(out)))
    for _ in range(100):
        poison([out])
        again = copies(tensors_of(call(out)))
        assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_gpu_every_op_replays_in_a_graph(name: str) -> None:
    call, out = kernel_calls()[name]
    wanted = copies(tensors_of(call(out)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = tensors_of(call(out))
    for _ in range(3):
        poison(result)
        graph.replay()
        assert all(np.array_equal(one, other) for one, other in zip(wanted, copies(result), strict=True))
