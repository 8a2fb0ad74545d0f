"""Holds a whole linear to the float64 product with its reconstructed weight, at any cut into panels and rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import PAIRS, as_bits, poisoned, random_codes, relative_error
from trellis_format.rates import Rate
from trellis_format.reference import reconstruct
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels import linear as module
from trellis_kernels.linear import linear, linear_keys, panel_channels, precompile_linears
from trellis_prep import PreparedLinear

K, N, WIDTH = 384, 256, 320
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BOUND = 1e-3  # float16 rounds the rotated input once; half of its step, relative, is 4.9e-4


def make(
    codebook: str, rate: Rate, *, biased: bool = False, device: str = "cpu", k: int = K, n: int = N
) -> tuple[PreparedLinear, np.ndarray]:
    """A linear of random codes, and `[k, n] float64`, its weight."""
    rng = np.random.default_rng(5)
    codes = random_codes(k // 16, n // 16, rate=rate)
    suh, svh = ((rng.choice([-1.0, 1.0], size) * rng.uniform(0.5, 2, size)).astype(np.float16) for size in (k, n))
    bias = torch.from_numpy(rng.normal(size=(1, n)).astype(np.float16)).to(device) if biased else None
    weight = PreparedLinear(
        codebook, rate, *(torch.from_numpy(part).to(device) for part in (codes, suh[None], svh[None])), bias
    )
    return weight, reconstruct(codes, suh, svh, codebook, rate)


def inputs(rows: int, dtype: torch.dtype = torch.float16, device: str = "cpu", width: int = WIDTH) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)


def truth(x: torch.Tensor, weight: np.ndarray, bias: torch.Tensor | None) -> np.ndarray:
    padded = np.zeros((x.shape[0], weight.shape[0]))
    padded[:, : x.shape[1]] = x.cpu().double().numpy()
    return padded @ weight + (0 if bias is None else bias.cpu().double().numpy())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("codebook", "rate"), PAIRS)
def test_every_codebook_and_rate(codebook: str, rate: Rate, device: str) -> None:
    weight, reference = make(codebook, rate, device=device)
    x, out = inputs(5, device=device), poisoned(5, N, device=device)
    assert linear(x, weight, out=out) is out
    assert relative_error(out.cpu(), truth(x, reference, None)) < BOUND


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_activation_dtypes_and_biases(dtype: torch.dtype, biased: bool, device: str) -> None:
    weight, reference = make("mcg", Rate.of(3), biased=biased, device=device)
    x, out = inputs(3, dtype, device), poisoned(3, N, dtype=dtype, device=device)
    linear(x, weight, out=out)
    bound = 4e-3 if dtype is torch.bfloat16 else BOUND
    assert relative_error(out.cpu(), truth(x, reference, weight.bias)) < bound


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("panel_bytes", [1, 128 * 2 * N, 256 * 2 * N])
def test_panels_of_input_channels_add_up(panel_bytes: int, device: str) -> None:
    weight, reference = make("mul1", Rate.of(2.5), biased=True, device=device)
    x, out = inputs(4, device=device), poisoned(4, N, device=device)
    linear(x, weight, out=out, panel_bytes=panel_bytes)
    assert panel_channels(K, N, panel_bytes) == max(panel_bytes // (2 * N), 128)
    assert relative_error(out.cpu(), truth(x, reference, weight.bias)) < BOUND


def test_cuts_of_rows_and_panels_give_the_same_bits_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = make("3inst", Rate.of(4))
    x = inputs(300)
    whole = as_bits(linear(x, weight, out=poisoned(300, N)))
    monkeypatch.setattr(module, "SUM_BYTES", 1)
    np.testing.assert_array_equal(as_bits(linear(x, weight, out=poisoned(300, N), panel_bytes=1)), whole)
    alone = as_bits(linear(x[217:218], weight, out=poisoned(1, N)))
    np.testing.assert_array_equal(alone, whole[217 * 4 * N : 218 * 4 * N])


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows_are_no_work(device: str) -> None:
    weight, _ = make("mcg", Rate.of(3), device=device)
    assert linear(inputs(0, device=device), weight, out=poisoned(0, N, device=device)).shape == (0, N)


def test_what_does_not_fit_is_refused() -> None:
    weight, _ = make("mcg", Rate.of(3))
    x = inputs(2)
    with pytest.raises(KernelValueError, match=r"out must be \[2, 256\], got \[2, 128\]"):
        linear(x, weight, out=poisoned(2, 128))
    with pytest.raises(KernelValueError, match="x has 512 channels, the linear 384"):
        linear(torch.zeros(2, 512, dtype=torch.float16), weight, out=poisoned(2, N))
    with pytest.raises(KernelTypeError, match=r"x must be .*float16.*, got torch\.int32"):
        linear(x.int(), weight, out=poisoned(2, N))


FEW = [("mul1", "3"), ("mcg", "4"), ("3inst", "2"), ("mul1", "2.5"), ("mcg", "8"), ("mul1", "1")]


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "n"), [(K, N), (4224, 128), (128, 1152)])
@pytest.mark.parametrize(("codebook", "rate"), FEW)
def test_few_rows_are_near_float64_and_have_their_own_bits(codebook: str, rate: str, k: int, n: int) -> None:
    weight, reference = make(codebook, Rate.of(rate), biased=k == K, device="cuda", k=k, n=n)
    x = inputs(8, device="cuda", width=k)
    whole = linear(x, weight, out=poisoned(8, n, device="cuda"))
    assert relative_error(whole, truth(x, reference, weight.bias)) < BOUND
    for rows in (slice(0, 1), slice(3, 6), slice(7, 8)):
        found = linear(x[rows], weight, out=poisoned(rows.stop - rows.start, n, device="cuda"))
        np.testing.assert_array_equal(as_bits(found), as_bits(whole[rows]))
    again = linear(x, weight, out=poisoned(8, n, device="cuda"))
    np.testing.assert_array_equal(as_bits(again), as_bits(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_few_rows_of_every_dtype(dtype: torch.dtype) -> None:
    weight, reference = make("mcg", Rate.of(4), biased=True, device="cuda")
    x = inputs(5, dtype, "cuda", K)
    out = linear(x, weight, out=poisoned(5, N, dtype=dtype, device="cuda"))
    bound = 4e-3 if dtype is torch.bfloat16 else BOUND
    assert relative_error(out, truth(x, reference, weight.bias)) < bound


@pytest.mark.gpu
def test_what_was_precompiled_launches_while_nothing_may_compile() -> None:
    from trellis_kernels.cute import compiler

    weight, _ = make("mcg", Rate.of(4), device="cuda")
    precompile_linears([weight], torch.float16)
    compiler.freeze()
    try:
        for rows, width in ((1, K), (8, K), (1, WIDTH), (9, K), (600, K)):
            linear(
                inputs(rows, device="cuda", width=width),
                weight,
                out=poisoned(rows, N, dtype=torch.float16, device="cuda"),
            )
    finally:
        compiler.thaw()


def test_a_cpu_has_no_kernels() -> None:
    weight, _ = make("mcg", Rate.of(4))
    assert linear_keys(weight, torch.float16) == ()
    precompile_linears([weight], torch.float16)
    with pytest.raises(KernelTypeError, match=r"got torch\.float64"):
        linear_keys(weight, torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(1, WIDTH), (7, WIDTH), (1, K), (7, K)])
def test_a_graph_holds_it(rows: int, width: int) -> None:
    weight, reference = make("mul1", Rate.of(3), biased=True, device="cuda")
    x, out = inputs(rows, device="cuda", width=width), poisoned(rows, N, device="cuda")
    linear(x, weight, out=out)  # compiles
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            linear(x, weight, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, expected)
    x.mul_(-0.5)
    graph.replay()
    assert relative_error(out.cpu(), truth(x, reference, weight.bias)) < BOUND
