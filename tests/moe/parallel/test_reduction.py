"""Holds the declaration of a reduction to its names and numbers."""

from __future__ import annotations

from typing import Any

import pytest

from trellis_moe import MoeTypeError, MoeValueError
from trellis_moe.parallel import ReduceSpec
from trellis_moe.parallel.reduction import COLLECTIVES, EXPERT_SUMS


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("experts", EXPERT_SUMS)
def test_every_declaration_evaluates_back(collective: str, experts: str) -> None:
    spec = ReduceSpec(collective=collective, experts=experts, overlap_tokens=7, one_shot_bytes=64)
    assert eval(repr(spec)) == spec
    assert spec != ReduceSpec(collective=collective, experts=experts)


@pytest.mark.parametrize(
    ("field", "value", "kind", "words"),
    [
        ("collective", "gather", MoeValueError, "collective 'gather' is not one of all_reduce, reduce_scatter, none"),
        ("dtype", "float64", MoeValueError, "dtype 'float64' is not one of"),
        ("experts", "any", MoeValueError, "experts 'any' is not one of ordered, partial"),
        ("order", "rank", MoeValueError, "order 'rank' is not one of ranks, any"),
        ("transport", "air", MoeValueError, "transport 'air' is not one of group, copies"),
        ("overlap_tokens", 0, MoeValueError, "overlap_tokens must be at least 1, got 0"),
        ("overlap_tokens", 2.0, MoeTypeError, "overlap_tokens must be an int, got float"),
        ("one_shot_bytes", -1, MoeValueError, "one_shot_bytes must be at least 0, got -1"),
        ("one_shot_bytes", None, MoeTypeError, "one_shot_bytes must be an int, got NoneType"),
        ("one_shot_bytes", True, MoeTypeError, "one_shot_bytes must be an int, got bool"),
    ],
)
def test_what_is_refused(field: str, value: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ReduceSpec(**{field: value})


def test_copies_have_one_order() -> None:
    with pytest.raises(MoeValueError, match="transport 'copies' adds in the order of ranks, got order 'any'"):
        ReduceSpec(transport="copies", order="any")
