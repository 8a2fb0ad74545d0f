"""Owns a short form of long lists of JSON objects: tables, with what all rows share said once.

It must not know receipts.  A list becomes one table for all objects that have the same keys, in the order in which they
come first; so objects with other keys may change places with them, and come back in the order of the tables.  Nested
keys are joined by dots, and elements of a list of objects by their index: `{"case": {"k": 3}, "ratios": [{"of": 1}]}`
has `case.k` and `ratios.0.of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["pack", "unpack"]


def pack(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tables of a list.

    Args:
        objects: JSON objects whose keys have no dot and are no numbers.

    Returns:
        Tables with `same`, key and value that all rows share; `columns`, the other keys; and `rows`, their values.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in objects:
        flat = dict(_flatten(each))
        groups.setdefault(tuple(flat), []).append(flat)
    tables = []
    for keys, rows in groups.items():
        shared = {key for key in keys if len(rows) > 1 and len({json.dumps(row[key]) for row in rows}) == 1}
        columns = [key for key in keys if key not in shared]
        tables.append({
            "same": {key: rows[0][key] for key in keys if key in shared},
            "columns": columns,
            "rows": [[row[key] for key in columns] for row in rows],
        })  # fmt: skip
    return tables


def unpack(tables: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list of some tables.

    Args:
        tables: from `pack`.

    Raises:
        KeyError, TypeError, ValueError: if one is no table.
    """
    return [
        _nest({**table["same"], **dict(zip(table["columns"], row, strict=True))})
        for table in tables
        for row in table["rows"]
    ]


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, dict) and each:
            yield from _flatten(each, f"{prefix}{key}.")
        elif isinstance(each, list) and each and all(isinstance(part, dict) for part in each):
            yield from _flatten({str(index): part for index, part in enumerate(each)}, f"{prefix}{key}.")
        else:
            yield prefix + key, each


def _nest(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        place = tree
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return {key: _listed(value) for key, value in tree.items()}


def _listed(value: Any) -> Any:
    """Objects whose keys are indices become lists again."""
    if not isinstance(value, dict):
        return value
    parts = {key: _listed(each) for key, each in value.items()}
    if parts and all(key.isdigit() for key in parts):
        return [parts[str(index)] for index in range(len(parts))]
    return parts
