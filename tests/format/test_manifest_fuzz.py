"""Holds every strict schema to its own errors, whatever becomes of the JSON: no other exception, no endless message."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format.native.test_config import GROUPED, K3
from format.native.test_manifest import GOOD
from slot_files import manifest_json
from trellis_format.container.manifest import parse_manifest as parse_container
from trellis_format.errors import FormatError
from trellis_format.files.strict_json import parse_json
from trellis_format.native.config import parse_config
from trellis_format.native.manifest import parse_manifest as parse_native

BASES: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "uniform": (parse_container, manifest_json()),
    "transform": (parse_container, manifest_json(codebook="lut_e4m3", bits=2, transform=True)),
    "pairs": (parse_container, manifest_json(kinds=("P33", "P43"), alignment=8)),
    "native": (parse_native, GOOD),
    "config": (parse_config, K3),
    "grouped": (parse_config, GROUPED),
}
EACH = pytest.mark.parametrize("base", BASES)
VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8), st.sampled_from(["mcg", "mul1", "uniform", "none", "P33", "0" * 64, "\u0663"]),
    st.lists(st.one_of(st.integers(-2, 100), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.sampled_from(["kind", "file", "sha256", "3", "03", "bits"]), st.integers(0, 3), max_size=2),
)  # fmt: skip
KEYS = st.sampled_from(["stray", "", "schema_name", "pre_block", "bits", "model_config", "layers", "__class__"])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path to a value inside JSON."""
    if path:
        yield path
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


def mutate(draw: Callable[[st.SearchStrategy[Any]], Any], data: Any) -> None:
    """Replace, remove or add one value."""
    found = list(places(data))
    if not found:
        return
    *parents, last = draw(st.sampled_from(found))
    here = data
    for key in parents:
        here = here[key]
    action = draw(st.sampled_from(["replace", "replace", "remove", "add"]))
    if action == "remove":
        del here[last]
    elif action == "add" and isinstance(here, dict):
        here[draw(KEYS)] = draw(VALUES)
    else:
        here[last] = draw(VALUES)


def only_own_errors(parse: Callable[[Any], Any], read: Callable[[], Any]) -> None:
    caught: FormatError | None = None
    try:
        found = parse(read())
    except FormatError as error:
        caught = error
    if caught is None:
        assert parse(found.to_json()) == found
    else:
        assert len(str(caught)) < 4000
        assert isinstance(caught, ValueError | TypeError)


@EACH
@given(st.data())
@settings(max_examples=150)
def test_changed_values_raise_only_own_errors(base: str, data: st.DataObject) -> None:
    parse, good = BASES[base]
    changed = copy.deepcopy(good)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data.draw, changed)
    only_own_errors(parse, lambda: changed)


@EACH
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=100)
def test_changed_bytes_raise_only_own_errors(base: str, changes: list[tuple[int, int]]) -> None:
    parse, good = BASES[base]
    raw = bytearray(json.dumps(good).encode())
    for place, byte in changes:
        raw[place % len(raw)] = byte
    only_own_errors(parse, lambda: parse_json(bytes(raw)))
