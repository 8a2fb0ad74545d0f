"""Holds stored scales to what is declared of them, and effective ones to the float16 product, one element at a time."""

from __future__ import annotations

import numpy as np
import pytest

from slot_files import halves
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.native.config import BoundaryConfig
from trellis_format.native.scales import Boundary, ScaleFactors, resolve_scales

EXPERTS, CHANNELS = 4, 96
ROWS = {Boundary.INPUT: 2, Boundary.INTERMEDIATE: 3, Boundary.OUTPUT: 1}


def declared(vectors: str, gains: str = "none") -> BoundaryConfig:
    return BoundaryConfig(vectors=vectors, gains=gains)  # type: ignore[arg-type]


def resolve(
    boundary: Boundary, factors: ScaleFactors, config: BoundaryConfig, experts: int = EXPERTS
) -> tuple[np.ndarray, bool]:
    return resolve_scales(boundary, factors, config, experts, ROWS[boundary], CHANNELS)


CASES = [
    (Boundary.INPUT, (CHANNELS,), 1), (Boundary.INPUT, (2, CHANNELS), 2), (Boundary.INTERMEDIATE, (3, CHANNELS), 3),
    (Boundary.OUTPUT, (CHANNELS,), 1),
]  # fmt: skip


@pytest.mark.parametrize("granularity", ["uniform", "per_layer", "per_expert"])
@pytest.mark.parametrize(("boundary", "shape", "rows"), CASES)
def test_without_gains_vectors_are_a_view(
    boundary: Boundary, shape: tuple[int, ...], rows: int, granularity: str
) -> None:
    lead = (EXPERTS,) if granularity == "per_expert" else ()
    vectors = halves(np.random.default_rng(0), *lead, *shape)
    found, shared = resolve(boundary, ScaleFactors(vectors), declared(granularity))
    assert found.shape == (*lead, rows, CHANNELS)
    assert shared is (granularity != "per_expert")
    assert found.ctypes.data == vectors.ctypes.data
    assert found.tobytes() == vectors.tobytes()


GAINS = {
    "shared": [(), (1,)],
    "per_expert": [(EXPERTS,)],
    "shared rows": [None],
    "per_expert rows": [None],
}


@pytest.mark.parametrize("kind", GAINS)
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize(("boundary", "shape", "rows"), CASES)
def test_effective_scales_are_the_product(
    boundary: Boundary, shape: tuple[int, ...], rows: int, own: bool, kind: str
) -> None:
    rng = np.random.default_rng(1)
    vectors = halves(rng, *((EXPERTS,) if own else ()), *shape)
    count = ROWS[boundary]
    for known in GAINS[kind]:
        gain_shape = known if known is not None else ((EXPERTS, count) if "expert" in kind else (count,))
        gains = halves(rng, *gain_shape) if gain_shape else np.float16(0.75) + np.zeros((), np.float16)
        config = declared("per_expert" if own else "per_layer", "per_expert" if "expert" in kind else "per_layer")
        found, shared = resolve(boundary, ScaleFactors(vectors, gains), config)
        assert shared is not (own or "expert" in kind)
        full = np.broadcast_to(found, (EXPERTS, *found.shape[-2:]))
        for expert in range(EXPERTS):
            for row in range(full.shape[1]):
                mine = vectors[expert] if own else vectors
                line = mine if mine.ndim == 1 else mine[row]
                part = gains[expert] if "expert" in kind else gains
                gain = part if part.ndim == 0 else part[row if part.size > 1 else 0]
                exact = line.astype(np.float64) * float(gain)
                assert np.array_equal(full[expert, row], exact.astype(np.float16))


def test_one_input_vector_with_two_gains_is_two_rows() -> None:
    vectors = np.ones(CHANNELS, np.float16)
    found, _ = resolve(
        Boundary.INPUT, ScaleFactors(vectors, np.array([2, 3], np.float16)), declared("uniform", "uniform")
    )
    assert found.tolist() == [[2.0] * CHANNELS, [3.0] * CHANNELS]


@pytest.mark.parametrize("granularity", ["per_layer", "per_expert"])
def test_with_one_expert_the_declaration_decides(granularity: str) -> None:
    vectors = halves(np.random.default_rng(2), 1, CHANNELS)
    if granularity == "per_expert":
        found, shared = resolve(Boundary.OUTPUT, ScaleFactors(vectors), declared(granularity), experts=1)
        assert (found.shape, shared) == ((1, 1, CHANNELS), False)
    else:
        found, shared = resolve(Boundary.OUTPUT, ScaleFactors(vectors), declared(granularity), experts=1)
        assert (found.shape, shared) == ((1, CHANNELS), True)


def test_with_two_experts_the_declaration_decides_whose_rows_they_are() -> None:
    vectors = halves(np.random.default_rng(3), 2, CHANNELS)
    mine, shared = resolve(Boundary.INPUT, ScaleFactors(vectors), declared("per_expert"), experts=2)
    assert (mine.shape, shared) == ((2, 1, CHANNELS), False)
    both, shared = resolve(Boundary.INPUT, ScaleFactors(vectors), declared("per_layer"), experts=2)
    assert (both.shape, shared) == ((2, CHANNELS), True)
    gains = ScaleFactors(np.ones(CHANNELS, np.float16), np.array([2, 3], np.float16))
    own, shared = resolve(Boundary.INPUT, gains, declared("per_layer", "per_expert"), experts=2)
    assert (own[:, :, 0].tolist(), shared) == ([[2.0], [3.0]], False)
    rows, shared = resolve(Boundary.INPUT, gains, declared("per_layer", "per_layer"), experts=2)
    assert (rows[:, 0].tolist(), shared) == ([2.0, 3.0], True)


@pytest.mark.parametrize("boundary", Boundary)
def test_gains_and_their_declaration_come_together(boundary: Boundary) -> None:
    shape = (3, CHANNELS) if boundary is Boundary.INTERMEDIATE else (CHANNELS,)
    vectors = np.ones(shape, np.float16)
    with pytest.raises(FormatValueError, match=f"{boundary}: gains are given, but none are declared"):
        resolve(boundary, ScaleFactors(vectors, np.ones(1, np.float16)), declared("per_layer"))
    with pytest.raises(FormatValueError, match=f"{boundary}: gains are missing, but per_expert gains are declared"):
        resolve(boundary, ScaleFactors(vectors), declared("per_layer", "per_expert"))


@pytest.mark.parametrize(
    ("boundary", "shape", "granularity", "legal"),
    [
        (Boundary.INPUT, (3, CHANNELS), "per_layer", r"\[2, 96\] or \[96\]"),
        (Boundary.INPUT, (EXPERTS, 3, CHANNELS), "per_expert", r"\[4, 2, 96\] or \[4, 96\]"),
        (Boundary.INPUT, (2, CHANNELS), "per_expert", r"\[4, 2, 96\] or \[4, 96\]"),
        (Boundary.INTERMEDIATE, (CHANNELS,), "uniform", r"\[3, 96\]"),
        (Boundary.OUTPUT, (CHANNELS + 1,), "per_layer", r"\[1, 96\] or \[96\]"),
    ],
)
def test_vectors_of_another_shape_are_refused(
    boundary: Boundary, shape: tuple[int, ...], granularity: str, legal: str
) -> None:
    with pytest.raises(FormatValueError, match=rf"{boundary}: {granularity} vectors must have shape {legal}, got \["):
        resolve(boundary, ScaleFactors(np.ones(shape, np.float16)), declared(granularity))


@pytest.mark.parametrize(
    ("shape", "granularity", "legal"),
    [((3,), "per_layer", r"\[\] or \[1\] or \[2\]"), ((1,), "per_expert", r"\[4\] or \[4, 2\]")],
)
def test_gains_of_another_shape_are_refused(shape: tuple[int, ...], granularity: str, legal: str) -> None:
    factors = ScaleFactors(np.ones(CHANNELS, np.float16), np.ones(shape, np.float16))
    with pytest.raises(FormatValueError, match=rf"input_scales: {granularity} gains must have shape {legal}, got \["):
        resolve(Boundary.INPUT, factors, declared("per_layer", granularity))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_are_finite(value: float) -> None:
    vectors = np.ones((2, CHANNELS), np.float16)
    vectors[1, 7] = value
    with pytest.raises(FormatValueError, match=r"input_scales: vectors must be finite, got .* at \[1, 7\]"):
        resolve(Boundary.INPUT, ScaleFactors(vectors), declared("per_layer"))
    gains = np.array([1, value], np.float16)
    with pytest.raises(FormatValueError, match=r"input_scales: gains must be finite, got .* at \[1\]"):
        resolve(Boundary.INPUT, ScaleFactors(np.ones(CHANNELS, np.float16), gains), declared("uniform", "uniform"))


def test_products_are_finite() -> None:
    factors = ScaleFactors(np.full(CHANNELS, 60000, np.float16), np.array(2, np.float16))
    with pytest.raises(FormatValueError, match=r"vectors \* gains must be finite, got inf at \[0, 0\]"):
        resolve(Boundary.OUTPUT, factors, declared("per_layer", "per_layer"))


@pytest.mark.parametrize("name", ["vectors", "gains"])
def test_scales_are_contiguous_float16_arrays(name: str) -> None:
    good = {"vectors": np.ones((2, CHANNELS), np.float16), "gains": np.ones((2, 2), np.float16)}
    with pytest.raises(FormatTypeError, match=f"{name} must be float16, got float32"):
        ScaleFactors(**{**good, name: good[name].astype(np.float32)})
    with pytest.raises(FormatValueError, match=f"{name} must be contiguous, got strides"):
        ScaleFactors(**{**good, name: np.asfortranarray(good[name])})
    with pytest.raises(FormatTypeError, match=f"{name} must be an array, got list"):
        ScaleFactors(**{**good, name: [1.0]})  # type: ignore[arg-type]
