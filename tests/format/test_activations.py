"""Holds each activation to its formula, written out with math alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.activations import ACTIVATIONS, SITU_GATE_LIMIT, SITU_UP_LIMIT, Activation
from trellis_format.errors import FormatTypeError, FormatValueError

NUMBERS = st.floats(-60, 60)


def sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


FORMULAS = {
    "silu": lambda g, u: g * sigmoid(g) * u,
    "gelu_tanh": lambda g, u: 0.5 * g * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "situ": lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25),
}


@pytest.mark.parametrize("kind", FORMULAS)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8))
def test_gated_laws(kind: str, pairs: list[tuple[float, float]]) -> None:
    gate, up = (np.array(part)[None] for part in zip(*pairs, strict=True))
    expected = [[FORMULAS[kind](g, u) for g, u in pairs]]
    np.testing.assert_allclose(Activation(kind).apply(gate, up), expected, rtol=1e-9, atol=1e-12)


@given(NUMBERS, NUMBERS, st.floats(0.5, 20), st.floats(0.5, 2), st.floats(-1, 2))
def test_swigluoai_clamps_both_branches(g: float, u: float, limit: float, alpha: float, beta: float) -> None:
    law = Activation("swigluoai", limit=limit, alpha=alpha, beta=beta)
    gate, up = min(g, limit), max(-limit, min(u, limit))
    expected = gate * sigmoid(alpha * gate) * (up + beta)
    found = law.apply(np.array([[g]]), np.array([[u]]))[0, 0]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(NUMBERS, NUMBERS, st.floats(0.5, 20))
def test_a_limit_clamps_silu_in_the_same_way(g: float, u: float, limit: float) -> None:
    gate, up = min(g, limit), max(-limit, min(u, limit))
    found = Activation("silu", limit=limit).apply(np.array([[g]]), np.array([[u]]))[0, 0]
    assert found == pytest.approx(gate * sigmoid(gate) * up, rel=1e-9, abs=1e-12)


@given(NUMBERS)
def test_relu2_has_no_gate(u: float) -> None:
    law = Activation("relu2")
    assert not law.gated
    assert law.apply(None, np.array([[u]]))[0, 0] == max(u, 0.0) ** 2


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "relu2"])
def test_large_arguments_neither_overflow_nor_warn(kind: str) -> None:
    gate = np.array([[-1e4, -800.0, 0.0, 800.0, 1e4]])
    with np.errstate(all="raise"):
        result = Activation(kind).apply(gate, np.ones_like(gate))
    assert np.isfinite(result).all()
    assert result[0, 2] == 0.0
    assert abs(result[0, 0]) < 1e-6


def test_the_bounds_of_situ() -> None:
    assert (SITU_GATE_LIMIT, SITU_UP_LIMIT) == (4.0, 25.0)
    assert Activation("situ").apply(np.array([[1e6]]), np.array([[1e6]]))[0, 0] == pytest.approx(100.0)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_gate_is_given_exactly_when_the_law_takes_one(kind: str) -> None:
    law = Activation(kind)
    wrong = None if law.gated else np.zeros((1, 1))
    with pytest.raises(FormatValueError, match=f"{kind} takes {'a' if law.gated else 'no'} gate"):
        law.apply(wrong, np.zeros((1, 1)))


@pytest.mark.parametrize("law", [Activation("silu"), Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)])
def test_repr_evaluates_back(law: Activation) -> None:
    assert eval(repr(law)) == law


@pytest.mark.parametrize("kind", [kind for kind in ACTIVATIONS if kind != "swigluoai"])
def test_a_named_law_without_constants_is_plain(kind: str) -> None:
    assert Activation.named(kind) == Activation(kind)


@given(NUMBERS, NUMBERS)
def test_swigluoai_by_name_is_the_law_of_gpt_oss(g: float, u: float) -> None:
    gate, up = min(g, 7.0), max(-7.0, min(u, 7.0))
    found = Activation.named("swigluoai").apply(np.array([[g]]), np.array([[u]]))[0, 0]
    assert found == pytest.approx(gate * sigmoid(1.702 * gate) * (up + 1.0), rel=1e-9, abs=1e-12)


def test_a_law_by_an_unknown_name_is_refused() -> None:
    with pytest.raises(FormatValueError, match="unknown activation 'mish'; known: silu"):
        Activation.named("mish")


def test_unknown_kinds_name_the_known_ones() -> None:
    with pytest.raises(FormatValueError, match="unknown activation 'mish'; known: silu, gelu_tanh, situ"):
        Activation("mish")


@pytest.mark.parametrize("name", ["limit", "alpha", "beta"])
@pytest.mark.parametrize("value", ["7", None, True])
def test_constants_are_numbers(name: str, value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"activation {name} must be a number"):
        Activation("swigluoai", **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("constants", "text"),
    [
        ({"limit": math.nan}, "limit is NaN"),
        ({"alpha": math.nan}, "alpha is NaN"),
        ({"alpha": math.inf}, "alpha is infinite"),
        ({"beta": -math.inf}, "beta is infinite"),
        ({"limit": 0.0}, r"limit 0\.0 must be above 0"),
        ({"limit": -7}, "limit -7 must be above 0"),
    ],
)
def test_constants_are_sane(constants: dict[str, float], text: str) -> None:
    with pytest.raises(FormatValueError, match=text):
        Activation("swigluoai", **constants)
