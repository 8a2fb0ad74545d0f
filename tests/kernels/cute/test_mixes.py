"""Holds the loops of instruction mixes to their counts, and to binaries that have them."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")

from trellis_kernels.cute.mixes import MIXES, body, build, measure


@pytest.mark.parametrize("name", MIXES)
def test_a_turn_is_a_whole_number_of_mixes(name: str) -> None:
    lines = body(MIXES[name])
    size = sum(count for _, count in MIXES[name])
    assert len(lines) % size == 0
    products = sum("mma" in line for line in lines)
    wanted = sum(count for kind, count in MIXES[name] if "product" in kind)
    assert products == wanted * len(lines) // size


def test_instructions_are_spread_evenly() -> None:
    lines = body(MIXES["eight of mcg"])
    places = [index for index, line in enumerate(lines) if "mma" in line]
    assert all(abs(b - a - 37) <= 1 for a, b in itertools.pairwise(places))


@pytest.mark.parametrize("name", ["eight of mul1", "four of mul1, bytes as operands"])
def test_loops_compile(name: str) -> None:
    assert build(MIXES[name], 8, "sm_90a") is not None


@pytest.mark.gpu
def test_a_permute_and_a_multiply_run_beside_each_other() -> None:
    alone = [measure(MIXES[name], 16) for name in ("permute", "multiply")]
    both = measure(MIXES["permute and multiply"], 16)
    assert max(alone) * 0.9 < both < 0.8 * sum(alone)
