"""Holds the short form of lists to giving back what went in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trellis_moe.receipts.packing import pack, unpack

KEYS = st.sampled_from(["a", "b", "case", "ratios"])
LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(0, 9), max_size=3)
OBJECTS = st.recursive(
    st.dictionaries(KEYS, LEAVES, max_size=3),
    lambda inner: st.dictionaries(
        KEYS, LEAVES | inner | st.lists(inner.filter(bool), min_size=1, max_size=2), max_size=3
    ),
    max_leaves=8,
)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


@given(st.lists(OBJECTS, max_size=6), st.sampled_from([(), ("a",), ("a", "case.b")]))
@example([{"case": False}, {"case": 0}], ())  # equal to Python, not in JSON
@example([{"a": a, "b": b} for a in (False, 0) for b in range(3)], ("a",))
def test_what_is_packed_comes_back(objects: list[dict[str, Any]], by: tuple[str, ...]) -> None:
    back = unpack(json.loads(json.dumps(pack(objects, by))))
    assert sorted(map(canonical, back)) == sorted(map(canonical, objects))
    assert unpack(pack(back, by)) == back


def test_what_rows_share_is_said_once() -> None:
    objects = [{"case": {"k": "3", "tokens": n}, "ratios": [{"of": "a copy", "value": n / 8}]} for n in (1, 2)]
    assert pack(objects) == [
        {
            "same": {"case.k": "3", "ratios.0.of": "a copy"},
            "columns": ["case.tokens", "ratios.0.value"],
            "rows": [[1, 0.125], [2, 0.25]],
        }
    ]


def test_rows_with_the_same_keys_share_a_table() -> None:
    tables = pack([{"a": 1}, {"a": 2}, {"b": 1}, {"a": 1}])
    assert [(table["columns"], table["rows"]) for table in tables] == [(["a"], [[1], [2], [1]]), (["b"], [[1]])]
    assert pack([]) == []


def test_what_rows_of_a_group_share_is_said_once() -> None:
    objects = [{"name": name, "size": len(name), "n": n} for n in range(3) for name in ("long", "wide")]
    assert pack(objects, ("name",)) == [
        {
            "same": {"size": 4},
            "columns": ["n"],
            "grouped": ["name"],
            "groups": [{"of": ["long"], "rows": [[0], [1], [2]]}, {"of": ["wide"], "rows": [[0], [1], [2]]}],
        }
    ]
    assert "rows" in pack(objects[:4], ("name",))[0]  # groups of two
    assert "rows" in pack(objects, ("colour",))[0]


@pytest.mark.parametrize(
    "table",
    [
        {"columns": ["a"], "rows": [[1]]},
        {"same": {}, "columns": ["a", "b"], "rows": [[1]]},
        {"same": {}, "columns": ["a"]},
        {"same": {}, "columns": ["a"], "grouped": ["b"], "groups": [{"of": [1, 2], "rows": [[1]]}]},
        {"same": {}, "columns": ["a"], "grouped": [], "groups": [{"of": [], "rows": [[1, 2]]}]},
        3,
    ],
)
def test_what_is_no_table_is_refused(table: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        unpack([table])
