"""Holds the torch activations to the float64 laws of trellis-format, at ordinary and at extreme arguments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned
from trellis_format.activations import ACTIVATIONS, Activation
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels.cpu.activate import activate

LAWS = [
    *map(Activation, ACTIVATIONS),
    Activation("silu", limit=1.5),
    Activation("gelu_tanh", limit=0.75),
    Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0),
    Activation("swigluoai", limit=1.0, alpha=-0.5, beta=-2.0),
]


def branches(rows: int, channels: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    gate, up = (4.0 * torch.randn(rows, channels, generator=generator) for _ in range(2))
    return gate, up


def test_every_law_is_here() -> None:
    assert {law.kind for law in LAWS} == set(ACTIVATIONS)


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_law_in_float32(law: Activation) -> None:
    gate, up = branches(5, 131)
    extremes = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 100.0, -100.0, 1e4, -1e4])
    gate[0, :8], up[1, :8], gate[2, :8], up[2, :8] = extremes, extremes, extremes, extremes.flip(0)
    given = gate if law.gated else None
    out = poisoned(5, 131)
    assert activate(given, up, activation=law, out=out) is out
    truth = law.apply(None if given is None else gate.double().numpy(), up.double().numpy())
    np.testing.assert_allclose(out.double().numpy(), truth, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("law", LAWS, ids=repr)
@pytest.mark.parametrize("where", ["gate", "up"])
def test_nan_comes_through(law: Activation, where: str) -> None:
    if where == "gate" and not law.gated:
        pytest.skip("no gate")
    gate, up = branches(2, 64)
    (gate if where == "gate" else up)[1, 3] = float("nan")
    out = torch.zeros(2, 64)
    activate(gate if law.gated else None, up, activation=law, out=out)
    assert torch.isnan(out).nonzero().tolist() == [[1, 3]]


@pytest.mark.parametrize("law", LAWS, ids=repr)
def test_output_may_be_up(law: Activation) -> None:
    gate, up = branches(3, 64)
    out = poisoned(3, 64)
    activate(gate if law.gated else None, up, activation=law, out=out)
    activate(gate if law.gated else None, up, activation=law, out=up)
    np.testing.assert_array_equal(as_bits(up), as_bits(out))


def test_no_rows_are_no_work() -> None:
    out = poisoned(0, 64)
    assert activate(torch.zeros(0, 64), torch.zeros(0, 64), activation=Activation("silu"), out=out) is out


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"gate": None}, KernelValueError, "silu takes a gate"),
        ({"activation": Activation("relu2")}, KernelValueError, "relu2 takes no gate"),
        ({"gate": torch.zeros(2, 65)}, KernelValueError, r"gate must be \[2, 64\], got \[2, 65\]"),
        ({"gate": torch.zeros(2, 64).half()}, KernelTypeError, "gate must be torch.float32"),
        ({"up": torch.zeros(2, 64).half()}, KernelTypeError, "up must be torch.float32"),
        ({"out": torch.zeros(2, 64).half()}, KernelTypeError, "out must be torch.float32"),
        ({"out": torch.zeros(3, 64)}, KernelValueError, r"out must be \[2, 64\], got \[3, 64\]"),
        ({"gate": torch.zeros(2, 64, device="meta")}, KernelTypeError, "gate must be on cpu"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, object], error: type[Exception], text: str) -> None:
    call = {"gate": torch.zeros(2, 64), "up": torch.zeros(2, 64), "activation": Activation("silu")} | change
    with pytest.raises(error, match=text):
        activate(call["gate"], call["up"], activation=call["activation"], out=call.get("out", poisoned(2, 64)))
