"""Holds the dispatch of ops to backends: who runs, what is refused, and that arguments arrive as they were given."""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from types import SimpleNamespace

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
