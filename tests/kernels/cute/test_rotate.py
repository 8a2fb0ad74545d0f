"""Holds the rotation kernel to the float64 law and to the torch backend's bits; its butterflies also without a GPU."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned
from trellis_format.hadamard import hadamard
from trellis_kernels import ColdKernelError, KernelTypeError, KernelValueError
from trellis_kernels.cpu import rotate as truth

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute import compiler, rotate
from trellis_kernels.cute.rotate import rotate_input, rotate_output

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


class LanesInNumpy:
    """The float32 register functions over 32 lanes at once."""

    CHUNK = 8
    add, subtract, multiply = staticmethod(np.add), staticmethod(np.subtract), staticmethod(np.multiply)

    @staticmethod
    def fused(first: np.ndarray, second: np.ndarray, addend: np.ndarray) -> np.ndarray:
        exact = first.astype(np.float64) * second.astype(np.float64) + addend.astype(np.float64)
        return exact.astype(np.float32)  # a product by one and a sum of two float32: float64 rounds as one step does

    @staticmethod
    def exchange(value: np.ndarray, distance: int) -> np.ndarray:
        return value[np.arange(32) ^ distance]

    @staticmethod
    def as_float(number: np.ndarray) -> np.ndarray:
        return number.astype(np.float32)


@pytest.mark.parametrize(("block", "chunks"), [(128, 1), (512, 2)])
def test_butterflies_in_numpy_have_the_torch_backends_bits(
    monkeypatch: pytest.MonkeyPatch, block: int, chunks: int
) -> None:
    monkeypatch.setattr(rotate, "values", LanesInNumpy)
    monkeypatch.setattr(rotate, "Float32", np.float32)
    row = np.random.default_rng(0).standard_normal(256 * chunks, dtype=np.float32)
    held = [[row[256 * chunk :][:256].reshape(32, 8)[:, index].copy() for index in range(8)] for chunk in range(chunks)]
    found = rotate._hadamard(held, np.arange(32), block)
    flat = np.concatenate([np.stack(chunk, axis=1).reshape(-1) for chunk in found])
    np.testing.assert_array_equal(flat, truth._hadamard(torch.from_numpy(row)[None], block)[0].numpy())
    np.testing.assert_allclose(flat, hadamard(row.astype(np.float64), block), atol=2e-6)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_gpu(call: dict[str, object]) -> dict[str, object]:
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in call.items()}


def same_bits(kernel, readable, first: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, **call: object) -> None:
    """Run both backends into poisoned outputs and compare bits."""
    wanted = readable(first, scales, **call, out=out.clone())
    found = kernel(first.cuda(), scales.cuda(), **on_gpu(call), out=out.cuda())
    torch.cuda.synchronize()
    np.testing.assert_array_equal(as_bits(found), as_bits(wanted))


def indices(count: int, high: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Indices of which some are out of range on either side."""
    found = torch.randint(-1, high + 1, (count,), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    if dtype == torch.int64:
        found[::7] = (1 << 32) + 1  # whose low half would be a legal index
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("block", [128, 512])
@pytest.mark.parametrize(("in_dtype", "out_dtype"), [*itertools.product(FLOATS, [torch.float16, torch.float32])])
@pytest.mark.parametrize(
    ("rows", "channels", "width"), [(1, 512, 512), (37, 1536, 1480), (700, 512, 509), (3, 7168, 1)]
)
def test_gpu_input_rotation(block, in_dtype, out_dtype, rows: int, channels: int, width: int) -> None:
    x, scales = normal(rows, width, dtype=in_dtype), normal(5, channels, dtype=torch.float16, seed=1)
    for index in (None, torch.int32, torch.int64):
        call: dict[str, object] = {"block": block}
        count = rows
        if index is not None:
            count = rows + 13
            call |= {"rows": indices(count, rows, index, 2), "tables": indices(count, 5, index, 3)}
        same_bits(rotate_input, truth.rotate_input, x, scales, poisoned(count, channels, dtype=out_dtype), **call)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [128, 512])
@pytest.mark.parametrize(("in_dtype", "out_dtype"), [*itertools.product(FLOATS, FLOATS)])
@pytest.mark.parametrize(("rows", "channels"), [(1, 512), (700, 1536), (3, 7168)])
def test_gpu_output_rotation(block, in_dtype, out_dtype, rows: int, channels: int) -> None:
    y, scales = normal(rows, channels, dtype=in_dtype), normal(5, channels, dtype=torch.float16, seed=1)
    bias = normal(6, channels, dtype=torch.float16, seed=4)
    for index, addend in itertools.product((None, torch.int32, torch.int64), (None, bias)):
        tables = None if index is None else indices(rows, 6, index, 3)
        out = poisoned(rows, channels, dtype=out_dtype)
        same_bits(rotate_output, truth.rotate_output, y, scales, out, tables=tables, bias=addend, block=block)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [128, 640, 1408])
def test_gpu_rotates_odd_numbers_of_blocks_within_float64(channels: int) -> None:
    x, scales = normal(33, channels, dtype=torch.bfloat16), normal(1, channels, dtype=torch.float16, seed=1)
    out = poisoned(33, channels, device="cuda")
    rotate_input(x.cuda(), scales.cuda(), out=out)
    wanted = hadamard(x.double().numpy() * scales.double().numpy())
    np.testing.assert_allclose(out.cpu().double().numpy(), wanted, atol=1e-5)


@pytest.mark.gpu
def test_gpu_rows_and_tables_may_be_slices_of_wider_ones() -> None:
    x, scales = normal(9, 3, 384), normal(4, 3, 384, dtype=torch.float16, seed=1)
    tables = torch.arange(9) % 4
    wanted = truth.rotate_input(x[:, 1], scales[:, 2], tables=tables, out=poisoned(9, 384))
    out = poisoned(9, 384, device="cuda")
    rotate_input(x.cuda()[:, 1], scales.cuda()[:, 2], tables=tables.cuda(), out=out)
    np.testing.assert_array_equal(as_bits(out), as_bits(wanted))


@pytest.mark.gpu
def test_gpu_output_may_be_the_input() -> None:
    y, scales = normal(600, 384), normal(1, 384, dtype=torch.float16, seed=1)
    wanted = truth.rotate_output(y, scales, out=poisoned(600, 384))
    given = y.cuda()
    rotate_output(given, scales.cuda(), out=given)
    np.testing.assert_array_equal(as_bits(given), as_bits(wanted))


@pytest.mark.gpu
def test_gpu_no_rows_are_no_work_and_an_empty_input_gives_zeros() -> None:
    scales = normal(1, 128, dtype=torch.float16).cuda()
    out = poisoned(0, 128, device="cuda")
    assert rotate_input(normal(0, 128).cuda(), scales, out=out) is out
    assert rotate_output(normal(0, 128).cuda(), scales, out=out) is out
    out = poisoned(2, 128, device="cuda")
    rotate_input(normal(0, 128).cuda(), scales, rows=torch.zeros(2, dtype=torch.int32, device="cuda"), out=out)
    assert not out.any()


@pytest.mark.gpu
def test_gpu_replays_in_a_graph_and_is_cold_without_warming(monkeypatch: pytest.MonkeyPatch) -> None:
    y, scales = normal(5, 256).cuda(), normal(1, 256, dtype=torch.float16).cuda()
    out = poisoned(5, 256, device="cuda")
    rotate_output(y, scales, out=out)
    wanted = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate_output(y, scales, out=out)
    y.neg_()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    np.testing.assert_array_equal(as_bits(out), as_bits(-wanted))
    monkeypatch.setattr(compiler, "_ready", {})
    compiler.freeze()
    try:
        with pytest.raises(ColdKernelError, match="RotateKey"):
            rotate_output(y, scales, out=out)
    finally:
        compiler.thaw()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.zeros(128, 2).T}, KernelValueError, "x must have contiguous rows"),
        ({"scales": torch.zeros(129).half()[1:].view(1, 128)}, KernelValueError, "scales must start at.* 2 bytes"),
        ({"out": torch.zeros(2, 256)[:, :128]}, KernelValueError, "out must be contiguous"),
        ({"tables": torch.zeros(4, dtype=torch.int32)[::2]}, KernelValueError, "tables must be contiguous"),
    ],
)
def test_gpu_what_kernels_cannot_read_is_refused(change, error: type[Exception], text: str) -> None:
    call: dict[str, object] = {"x": torch.zeros(2, 128), "scales": torch.zeros(1, 128).half(), "out": poisoned(2, 128)}
    call |= change
    moved = {name: _keep_strides(value) for name, value in call.items()}
    with pytest.raises(error, match=text):
        rotate_input(moved.pop("x"), moved.pop("scales"), **moved)


def _keep_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same view of a copy of the storage on the GPU."""
    base = tensor.new_empty(0).set_(tensor.untyped_storage()).cuda()
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def test_tensors_elsewhere_are_refused() -> None:
    with pytest.raises(KernelTypeError, match="x must be on a CUDA device, got cpu"):
        rotate_input(torch.zeros(1, 128), torch.zeros(1, 128).half(), out=torch.zeros(1, 128))
