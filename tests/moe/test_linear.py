"""Holds the module of a quantised linear to float64, to torch.compile, and to what moving a module must not do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trellis_format.rates import Rate
from trellis_format.reference import reconstruct
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.linear import TrellisLinear
from trellis_prep import PreparedLinear

K, N, IN, OUT = 256, 384, 200, 300
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def prepared(device: str = "cpu", *, codebook: str = "mcg") -> tuple[PreparedLinear, np.ndarray, np.ndarray]:
    """A linear of random codes, `[k, n] float64` its weight, and `[n]` its bias."""
    rng = np.random.default_rng(2)
    codes = rng.integers(-(2**15), 2**15, (K // 16, N // 16, 48), dtype=np.int16)
    suh, svh, bias = (rng.uniform(0.5, 2, size).astype(np.float16) for size in (K, N, N))
    parts = (torch.from_numpy(part).to(device) for part in (codes, suh[None], svh[None], bias[None]))
    weight = PreparedLinear(codebook, Rate.of(3), *parts)
    return weight, reconstruct(codes, suh, svh, codebook, Rate.of(3)), bias


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)


def error(y: torch.Tensor, x: torch.Tensor, weight: np.ndarray, bias: np.ndarray) -> float:
    truth = x.cpu().double().numpy() @ weight[: x.shape[-1], : y.shape[-1]] + bias[: y.shape[-1]]
    return float(np.linalg.norm(y.cpu().double().numpy() - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (0,)])
def test_leading_axes_and_padding(lead: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    weight, reference, bias = prepared(device)
    x = inputs(*lead, IN, dtype=dtype).to(device)
    y = TrellisLinear(weight, IN, OUT)(x)
    assert (tuple(y.shape), y.dtype, y.is_contiguous()) == ((*lead, OUT), dtype, True)
    if y.numel():
        assert error(y, x, reference, bias) < (4e-3 if dtype is torch.bfloat16 else 1e-3)


def test_strides_of_x_do_not_matter() -> None:
    weight, _, _ = prepared()
    x = inputs(4, 3, IN)
    module = TrellisLinear(weight, IN, OUT)
    assert torch.equal(module(x.transpose(0, 1)), module(x).transpose(0, 1))


def test_torch_compile_keeps_it_in_one_graph() -> None:
    weight, reference, bias = prepared()
    module = TrellisLinear(weight, IN, OUT)
    x = inputs(4, IN)
    y = torch.compile(lambda x: 2 * module(x), fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(y, 2 * module(x))
    assert error(y / 2, x, reference, bias) < 1e-3


def test_the_custom_op_is_sound() -> None:
    weight, _, _ = prepared()
    arguments = (weight.codes, weight.input_scale, weight.output_scale, weight.bias, "mcg", 6, OUT)
    torch.library.opcheck(torch.ops.trellis.linear.default, (inputs(2, IN), *arguments))


@pytest.mark.parametrize("cast", ["half", "float", "bfloat16", "double"])
def test_casting_a_model_leaves_codes_and_scales_alone(cast: str) -> None:
    weight, _, _ = prepared()
    model = nn.Sequential(TrellisLinear(weight), nn.Linear(N, 4))
    getattr(model, cast)()
    assert model[0].prepared is weight
    assert model[1].weight.dtype is not torch.float16 or cast == "half"


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moving_a_model_moves_the_weight(device: str) -> None:
    weight, _, _ = prepared()
    module = nn.Sequential(TrellisLinear(weight)).to(device)[0]
    found = module.prepared
    assert found.device.type == device
    assert (found.codes.dtype, found.input_scale.dtype) == (torch.int16, torch.float16)
    assert found.bias is not None
    assert found.bias.device.type == device


def test_what_does_not_fit_is_refused() -> None:
    weight, _, _ = prepared()
    with pytest.raises(MoeValueError, match="in_features 257 must be from 1 to the 256 stored channels"):
        TrellisLinear(weight, 257)
    with pytest.raises(MoeValueError, match="out_features 0 must be from 1 to the 384"):
        TrellisLinear(weight, None, 0)
    with pytest.raises(MoeTypeError, match="must be a PreparedLinear, got ndarray"):
        TrellisLinear(np.zeros(3))  # type: ignore[arg-type]  # what the test is about
    module = TrellisLinear(weight, IN)
    with pytest.raises(MoeValueError, match="x has 256 channels, the linear takes 200"):
        module(inputs(2, 256))
    with pytest.raises(MoeTypeError, match=r"got torch\.float64"):
        module(inputs(2, IN).double())
    with pytest.raises(MoeTypeError, match="x must be on cpu, got meta"):
        module(inputs(2, IN).to("meta"))


def test_its_repr_names_codebook_and_rate() -> None:
    weight, _, _ = prepared()
    assert repr(TrellisLinear(weight, IN, OUT)) == "TrellisLinear(200, 300, mcg, K=3, bias=True)"
