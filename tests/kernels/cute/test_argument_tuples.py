"""Holds tuples of launch arguments to their promise: a compiled host function reads what a caller named."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from trellis_kernels.cute.argument_tuples import blank, kinds, number


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
    assert [number(value) for value in (tensor, None, 7, 0.5)] == [tensor.data_ptr(), 0, 7, 0.5]


def test_a_compiled_function_reads_what_was_named(capfd) -> None:
    compiled = cute.compile(_host, blank(Sample))
    compiled(Sample(Int64(1 << 40), Int32(-7), Float32(0.25), Int64(3 << 33)))
    assert capfd.readouterr().out.split() == [str(1 << 40), "-7", "0.250000", str(3 << 33)]
