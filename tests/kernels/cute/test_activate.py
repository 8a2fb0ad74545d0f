"""Holds the activation kernel to the float64 laws of trellis-format."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import poisoned
from trellis_format.activations import ACTIVATIONS, Activation
from trellis_kernels import KernelTypeError, KernelValueError

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.activate import activate, activation_law

LAWS = [
    *map(Activation, ACTIVATIONS),
    Activation("silu", limit=1.5),
    Activation("gelu_tanh", limit=0.75),
    Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0),
]


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_law_has_a_device_side(kind: str) -> None:
    assert callable(activation_law(kind))


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("shape", [(1, 1), (5, 131), (64, 1408)])
def test_gpu_law_in_float32(law: Activation, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    gate, up = (4.0 * torch.randn(*shape, generator=generator) for _ in range(2))
    extremes = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e-3, -1e-3, 100.0, -100.0, 1e4, -1e4])[: gate.numel()]
    gate.view(-1)[: extremes.numel()] = extremes
    up.view(-1)[-extremes.numel() :] = extremes
    out = poisoned(*shape, device="cuda")
    assert activate(gate.cuda() if law.gated else None, up.cuda(), activation=law, out=out) is out
    truth = law.apply(gate.double().numpy() if law.gated else None, up.double().numpy())
    np.testing.assert_allclose(out.cpu().double().numpy(), truth, rtol=4e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_gpu_nan_comes_through(law: Activation) -> None:
    for index in range(2 if law.gated else 1):
        branches = [torch.ones(2, 65), torch.ones(2, 65)]
        branches[1 - index][1, 64] = float("nan")
        gate, up = (branch.cuda() for branch in branches)
        out = torch.zeros(2, 65, device="cuda")
        activate(gate if law.gated else None, up, activation=law, out=out)
        assert torch.isnan(out).nonzero().tolist() == [[1, 64]]


@pytest.mark.gpu
def test_gpu_output_may_be_up() -> None:
    gate, up = torch.randn(3, 77, device="cuda"), torch.randn(3, 77, device="cuda")
    wanted = activate(gate, up, activation=Activation("silu"), out=torch.empty_like(up)).clone()
    assert torch.equal(activate(gate, up, activation=Activation("silu"), out=up), wanted)


@pytest.mark.gpu
def test_gpu_refuses_what_it_cannot_read() -> None:
    up = torch.zeros(4, 64, device="cuda")
    with pytest.raises(KernelValueError, match="gate must be contiguous"):
        activate(up[:, :32], up[:, :32], activation=Activation("silu"), out=up[:, :32].contiguous())
    flat = torch.zeros(65, device="cuda")[1:].view(1, 64)
    with pytest.raises(KernelValueError, match="up must start at a multiple of 16 bytes, got 4"):
        activate(None, flat, activation=Activation("relu2"), out=torch.empty(1, 64, device="cuda"))


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(KernelTypeError, match="up must be on a CUDA device, got cpu"):
        activate(None, torch.zeros(1, 8), activation=Activation("relu2"), out=torch.zeros(1, 8))
