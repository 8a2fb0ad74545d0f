"""Owns a short form of long lists of JSON objects: tables, with what all rows share said once.

It must not know receipts.  A list becomes one table for all objects that have the same keys, in the order in which they
come first; so objects with other keys may change places with them, and come back in the order of the tables.  Nested
keys are joined by dots, and elements of a list of objects by their index: `{"case": {"k": 3}, "ratios": [{"of": 1}]}`
has `case.k` and `ratios.0.of`.  Rows of a table that also share values of some columns may lie in groups, which say
what theirs is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["pack", "unpack"]

_LEAST_GROUP = 3  # rows of a group, on average; what groups say takes more than it saves where they are shorter


def pack(objects: Sequence[dict[str, Any]], by: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The tables of a list.

    Args:
        objects: JSON objects whose keys have no dot and are no numbers.
        by: columns whose values make groups, in tables where groups are long.

    Returns:
        Tables with `same`, key and value that all rows share; `columns`, the other keys; and `rows`, their values.  In
        the place of `rows` a table may have `grouped`, the columns that are constant in every group, and `groups`, each
        with `of`, its values of these, and its `rows`.
    """
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in objects:
        flat = dict(_flatten(each))
        groups.setdefault(tuple(flat), []).append(flat)
    tables = []
    for keys, rows in groups.items():
        shared = {key for key in keys if len(rows) > 1 and len({json.dumps(row[key]) for row in rows}) == 1}
        columns = [key for key in keys if key not in shared]
        same = {key: rows[0][key] for key in keys if key in shared}
        tables.append({"same": same, **_laid_out(rows, columns, [key for key in by if key in columns])})
    return tables


def _laid_out(rows: Sequence[dict[str, Any]], columns: Sequence[str], by: Sequence[str]) -> dict[str, Any]:
    """Columns and rows of a table, in groups where these are few."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row[key] for key in by]), []).append(row)
    if not by or _LEAST_GROUP * len(groups) > len(rows):
        return {"columns": columns, "rows": [[row[key] for key in columns] for row in rows]}
    grouped = [key for key in columns if all(len({json.dumps(row[key]) for row in g}) == 1 for g in groups.values())]
    kept = [key for key in columns if key not in grouped]
    return {
        "columns": kept,
        "grouped": grouped,
        "groups": [
            {"of": [members[0][key] for key in grouped], "rows": [[row[key] for key in kept] for row in members]}
            for members in groups.values()
        ],
    }


def unpack(tables: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The list of some tables.

    Args:
        tables: from `pack`.

    Raises:
        KeyError, TypeError, ValueError: if one is no table.
    """
    return [
        _nest({**table["same"], **dict(zip(columns, row, strict=True))})
        for table in tables
        for columns, rows in _parts(table)
        for row in rows
    ]


def _parts(table: dict[str, Any]) -> Iterator[tuple[list[str], list[list[Any]]]]:
    """Columns and rows of each group; a table without groups is one."""
    if "groups" not in table:
        yield table["columns"], table["rows"]
        return
    for group in table["groups"]:
        if len(group["of"]) != len(table["grouped"]):
            raise ValueError(f"a group has {len(group['of'])} values of {len(table['grouped'])} columns")
        yield [*table["grouped"], *table["columns"]], [[*group["of"], *row] for row in group["rows"]]


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
