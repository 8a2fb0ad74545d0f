"""Holds the torch rotations to the float64 law, with gathered rows, tables, biases and rows that belong to nobody."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_cases import as_bits, poisoned
from trellis_format.hadamard import hadamard
from trellis_kernels import KernelTypeError, KernelValueError
from trellis_kernels.cpu.rotate import rotate_input, rotate_output

FLOATS = [torch.float16, torch.bfloat16, torch.float32]
INTEGERS = [torch.int32, torch.int64]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy()


def close(found: torch.Tensor, truth: np.ndarray) -> None:
    """Within one rounding of the output's dtype, and of float32 butterflies."""
    step = 2.0**-11 if found.dtype == torch.float16 else 2.0**-24
    scale = np.abs(truth).max(axis=1, keepdims=True)
    assert np.all(np.abs(double(found) - truth) <= step * np.abs(truth) + 2.0**-20 * scale)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("width", [128, 300, 384])
def test_input_rotation_is_scale_then_hadamard(dtype: torch.dtype, out_dtype: torch.dtype, width: int) -> None:
    x, scales = normal(5, width, dtype=dtype), normal(1, 384, dtype=torch.float16, seed=1)
    padded = np.zeros((5, 384))
    padded[:, :width] = double(x)
    out = poisoned(5, 384, dtype=out_dtype)
    assert rotate_input(x, scales, out=out) is out
    close(out, hadamard(padded * double(scales)))


@pytest.mark.parametrize("rotate", [rotate_input, rotate_output])
def test_blocks_of_512_with_signs_undo_themselves(rotate) -> None:
    x = normal(3, 1024)
    signs = torch.where(normal(1, 1024, seed=1) < 0, -1.0, 1.0).half()
    out = poisoned(3, 1024)
    rotate(x, signs, block=512, out=out)
    if rotate is rotate_input:
        close(out, hadamard(double(x) * double(signs), 512))
    else:
        close(out, hadamard(double(x), 512) * double(signs))
    back = poisoned(3, 1024)
    (rotate_output if rotate is rotate_input else rotate_input)(out, signs, block=512, out=back)
    np.testing.assert_allclose(double(back), double(x), atol=1e-5)


@pytest.mark.parametrize("index", INTEGERS)
def test_input_rotation_gathers_rows_and_tables(index: torch.dtype) -> None:
    x, scales = normal(4, 256), normal(3, 256, dtype=torch.float16, seed=1)
    rows = torch.tensor([3, 0, 0, 2, 1, 3], dtype=index)
    tables = torch.tensor([0, 2, 1, -1, 3, 2], dtype=index)
    out = poisoned(6, 256)
    rotate_input(x, scales, rows=rows, tables=tables, out=out)
    live = np.array([True, True, True, False, False, True])
    truth = hadamard(double(x)[rows] * double(scales)[np.where(live, tables, 0)]) * live[:, None]
    close(out, truth)
    assert not out[~torch.from_numpy(live)].any()


def test_rows_outside_the_input_give_zeros() -> None:
    x, scales = normal(2, 128), normal(1, 128, dtype=torch.float16, seed=1)
    out = poisoned(4, 128)
    rotate_input(x, scales, rows=torch.tensor([2, 1, -1, 1 << 40]), out=out)
    close(out[1:2], hadamard(double(x)[1:] * double(scales)))
    assert not out[[0, 2, 3]].any()


@pytest.mark.parametrize("rotate", [rotate_input, rotate_output])
def test_a_table_of_one_row_serves_every_index_that_is_not_negative(rotate) -> None:
    x, scales = normal(4, 128), normal(1, 128, dtype=torch.float16, seed=1)
    out, plain = poisoned(4, 128), poisoned(4, 128)
    rotate(x, scales, tables=torch.tensor([0, 7, -1, 1000]), out=out)
    rotate(x, scales, out=plain)
    plain[2] = 0.0
    np.testing.assert_array_equal(as_bits(out), as_bits(plain))


@pytest.mark.parametrize("rotate", [rotate_input, rotate_output])
def test_a_row_that_belongs_to_nobody_is_zero_whatever_it_holds(rotate) -> None:
    x, scales = normal(3, 128), normal(2, 128, dtype=torch.float16, seed=1)
    x[1] = float("nan")
    out = poisoned(3, 128)
    rotate(x, scales, tables=torch.tensor([0, -1, 1]), out=out)
    assert not out[1].any()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("rotate", [rotate_input, rotate_output])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spreads_over_its_block_alone(rotate, bad: float) -> None:
    x, scales = normal(2, 256), normal(1, 256, dtype=torch.float16, seed=1)
    x[1, 130] = bad
    out = poisoned(2, 256)
    rotate(x, scales, out=out)
    finite = torch.isfinite(out)
    assert finite[0].all()
    assert finite[1, :128].all()
    assert not finite[1, 128:].any()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("out_dtype", FLOATS)
def test_output_rotation_rounds_once(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    y, scales = normal(3, 256, dtype=dtype), normal(1, 256, dtype=torch.float16, seed=1)
    wide, out = poisoned(3, 256), poisoned(3, 256, dtype=out_dtype)
    rotate_output(y, scales, out=wide)
    close(wide, hadamard(double(y)) * double(scales))
    rotate_output(y, scales, out=out)
    np.testing.assert_array_equal(as_bits(out), as_bits(wide.to(out_dtype)))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("index", [None, *INTEGERS])
def test_output_rotation_is_hadamard_then_scale_then_bias(with_bias: bool, index: torch.dtype | None) -> None:
    y, scales = normal(4, 384), normal(3, 384, dtype=torch.float16, seed=1)
    bias = normal(3, 384, dtype=torch.float16, seed=2) if with_bias else None
    tables = None if index is None else torch.tensor([2, -1, 0, 2], dtype=index)
    rows = [0, 0, 0, 0] if index is None else [2, 0, 0, 2]
    truth = hadamard(double(y)) * double(scales)[rows]
    if bias is not None:
        truth = truth + double(bias)[rows]
    if index is not None:
        truth[1] = 0.0
    out = poisoned(4, 384)
    assert rotate_output(y, scales, tables=tables, bias=bias, out=out) is out
    close(out, truth)


def test_shared_scales_leave_each_expert_its_own_bias() -> None:
    y, scales = normal(3, 128), normal(1, 128, dtype=torch.float16, seed=1)
    bias = normal(2, 128, dtype=torch.float16, seed=2)
    out = poisoned(3, 128)
    rotate_output(y, scales, tables=torch.tensor([1, 2, 0]), bias=bias, out=out)
    truth = hadamard(double(y)) * double(scales) + double(bias)[[1, 0, 0]]
    truth[1] = 0.0  # no bias, so no such expert
    close(out, truth)


def test_output_may_be_the_input() -> None:
    y, scales = normal(3, 256), normal(1, 256, dtype=torch.float16, seed=1)
    out = poisoned(3, 256)
    rotate_output(y, scales, out=out)
    rotate_output(y, scales, out=y)
    np.testing.assert_array_equal(as_bits(y), as_bits(out))


def test_no_rows_are_no_work() -> None:
    scales = normal(1, 128, dtype=torch.float16)
    out = poisoned(0, 128)
    assert rotate_input(normal(0, 128), scales, out=out) is out
    assert rotate_output(normal(0, 128), scales, out=out) is out
    assert rotate_input(normal(0, 128), scales, rows=torch.zeros(0, dtype=torch.int32), out=out) is out


X, SCALES = torch.zeros(2, 128), torch.zeros(2, 128, dtype=torch.float16)


@pytest.mark.parametrize("rotate", [rotate_input, rotate_output])
@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": X.double()}, KernelTypeError, "got torch.float64"),
        ({"x": X[0]}, KernelValueError, r"got \[128\]"),
        ({"x": torch.zeros(2, 129)}, KernelValueError, "129"),
        ({"scales": SCALES.float()}, KernelTypeError, "scales must be torch.float16"),
        ({"scales": SCALES[:, :100]}, KernelValueError, "100 channels, not a multiple of 128"),
        ({"block": 256}, KernelValueError, "block 256 is not one of 128, 512"),
        ({"block": 512}, KernelValueError, "128 channels, not a multiple of 512"),
        ({"scales": SCALES[:0]}, KernelValueError, r"scales must have at least 1 row, got \[0, 128\]"),
        ({"out": torch.zeros(2, 128, dtype=torch.int32)}, KernelTypeError, "out must be"),
        ({"out": torch.zeros(3, 128)}, KernelValueError, r"out must be \[2, 128\], got \[3, 128\]"),
        ({"tables": torch.zeros(2)}, KernelTypeError, "tables must be torch.int32 or torch.int64"),
        ({"tables": torch.zeros(3, dtype=torch.int32)}, KernelValueError, r"tables must be \[2\], got \[3\]"),
        ({"tables": torch.zeros(2, dtype=torch.int32, device="meta")}, KernelTypeError, "tables must be on cpu"),
    ],
)
def test_wrong_arguments_are_refused(rotate, change: dict[str, object], error: type[Exception], text: str) -> None:
    call = {"x": X, "scales": SCALES, "out": poisoned(2, 128)} | change
    with pytest.raises(error, match=text):
        rotate(call.pop("x"), call.pop("scales"), **call)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (torch.zeros(2), KernelTypeError, "rows must be torch.int32 or torch.int64"),
        (torch.zeros(2, 1, dtype=torch.int32), KernelValueError, r"rows must be \[\*\], got \[2, 1\]"),
    ],
)
def test_wrong_rows_are_refused(rows: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rotate_input(X, SCALES, rows=rows, out=poisoned(2, 128))


@pytest.mark.parametrize(
    ("bias", "error", "text"),
    [
        (torch.zeros(2, 128), KernelTypeError, "bias must be torch.float16"),
        (SCALES[:, :64], KernelValueError, r"bias must be \[\*, 128\], got \[2, 64\]"),
        (SCALES[:0], KernelValueError, "bias must have at least 1 row"),
    ],
)
def test_wrong_bias_is_refused(bias: torch.Tensor, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        rotate_output(X, SCALES, bias=bias, out=poisoned(2, 128))
