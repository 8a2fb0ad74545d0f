"""Holds tuples of launch arguments to their promise: a compiled host function reads what a caller named."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from trellis_kernels.cute.argument_tuples import blank, filled, kinds


class Sample(NamedTuple):
    """Arguments of every kind."""

    address: Int64
    count: Int32
    factor: Float32
    other: Int64


@cute.jit
def _host(args: Sample):
    cute.printf("%ld %d %f %ld", args.address, args.count, args.factor, args.other)


def test_kinds_are_in_the_order_of_the_fields() -> None:
    assert list(kinds(Sample).items()) == [("address", Int64), ("count", Int32), ("factor", Float32), ("other", Int64)]


def test_a_tensor_is_its_address_and_nothing_is_zero() -> None:
    tensor = torch.zeros(3)
    args = filled(Sample, address=tensor, other=None, factor=0.5)
    assert [field.value for field in args] == [tensor.data_ptr(), 0, 0.5, 0]


def test_a_name_that_is_no_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="cuont"):
        filled(Sample, cuont=1)


def test_a_compiled_function_reads_what_was_named(capfd) -> None:
    compiled = cute.compile(_host, blank(Sample))
    compiled(filled(Sample, address=1 << 40, count=-7, factor=0.25, other=3 << 33))
    assert capfd.readouterr().out.split() == [str(1 << 40), "-7", "0.250000", str(3 << 33)]
