"""Holds receipts to having all that a number needs, and to numbers that agree with each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from receipt_samples import COPY, CPU, STATE, layer_case, layer_row, make_receipt, make_row
from trellis_moe.receipts.schema import Check, Machine, PrepareCase, Ratio, Receipt, Row, Versions

CONTENT = json.loads(make_receipt([layer_row(8, 155_000)]).model_dump_json(by_alias=True))
PATHS = [
    *(("command",), ("commit",), ("dirty",), ("created",), ("machine",), ("versions",), ("ceilings",), ("rows",)),
    *(("machine", name) for name in ("kind", "name", "count", "multiprocessors", "start", "end")),
    *(("machine", "start", 0, name) for name in STATE.model_dump()),
    *(("versions", name) for name in ("python", "torch", "trellis")),
    *(("ceilings", 0, name) for name in ("name", "unit", "work", "samples_ns")),
    *(("rows", 0, name) for name in ("case", "samples_ns", "bytes", "flops", "weights", "check", "ratios")),
    *(("rows", 0, "check", name) for name in ("reference", "error", "bound")),
    *(("rows", 0, "ratios", 0, name) for name in ("of", "value")),
]


def parent(content: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        content = content[step]
    return content


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_whatever_a_receipt_needs_is_missed(path: tuple[Any, ...]) -> None:
    content = json.loads(json.dumps(CONTENT))
    del parent(content, path)[path[-1]]
    with pytest.raises(ValidationError):
        Receipt.model_validate(content)
    assert Receipt.model_validate(CONTENT).rows[0].median_ns == 155_000


@pytest.mark.parametrize("path", [(), ("machine",), ("rows", 0), ("rows", 0, "case"), ("rows", 0, "check")])
def test_unknown_fields_are_refused(path: tuple[Any, ...]) -> None:
    content = json.loads(json.dumps(CONTENT))
    parent(content, (*path, "speedup"))["speedup"] = 3.0
    with pytest.raises(ValidationError, match="speedup"):
        Receipt.model_validate(content)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (("schema_version",), 2, "schema_version"),
        (("commit",), "main", "commit"),
        (("created",), "yesterday", "created"),
        (("rows", 0, "samples_ns"), [5, 5, 5, 5], "samples_ns"),
        (("rows", 0, "samples_ns"), [5, 5, 0, 5, 5], "samples_ns"),
        (("rows", 0, "check", "error"), 2e-3, "above its bound"),
        (("rows", 0, "check", "error"), float("nan"), "error"),
        (("rows", 0, "ratios"), [], "ratios"),
        (("rows", 0, "ratios", 0, "of"), "a dream", "has not measured"),
        (("rows", 0, "ratios", 0, "value"), 0.9, "its row says"),
        (("rows", 0, "ratios", 0, "better"), "up", "better"),
        (("rows", 0, "case", "kind"), "guess", "kind"),
        (("rows",), [], "rows"),
        (("machine", "count"), 2, "states"),
        (("machine", "driver"), None, "driver"),
        (("versions", "cuda"), None, "CUDA"),
        (("versions", "dsl"), None, "cutlass"),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_are_refused(path: tuple[Any, ...], value: Any, match: str) -> None:
    content = json.loads(json.dumps(CONTENT))
    parent(content, path)[path[-1]] = value
    with pytest.raises(ValidationError, match=match):
        Receipt.model_validate(content)


def test_a_ratio_is_the_rate_of_the_row_over_that_of_the_ceiling() -> None:
    row = make_row(layer_case(), 500, nbytes=1_000_000)
    assert row.rate("bytes") == 2e12
    assert COPY.rate == 4e12
    assert row.ratios[0].value == pytest.approx(0.5)
    with pytest.raises(ValidationError, match=r"its row says 0\.5"):
        make_receipt([row.model_copy(update={"ratios": (Ratio(of="device copy", value=0.51),)})])


def test_two_ceilings_of_a_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="same name"):
        make_receipt([layer_row(8, 155_000)], ceilings=[COPY])


def test_a_preparation_needs_its_memory() -> None:
    case = PrepareCase(layer="a layer", layers=1, bound_bytes=1, code_bytes=1)
    check = Check(reference="itself", error=0.0, bound=0.0)
    with pytest.raises(ValidationError, match="memory"):
        Row(
            case=case,
            samples_ns=(1,) * 5,
            bytes=1,
            flops=0,
            weights=0,
            check=check,
            ratios=(Ratio(of="device copy", value=1),),
        )


def test_a_rehearsal_has_no_states() -> None:
    versions = Versions(python="3.12", torch="2.11", trellis="0.1.0")
    assert make_receipt([layer_row(8, 155_000)], machine=CPU, versions=versions).machine.kind == "cpu"
    with pytest.raises(ValidationError, match="states"):
        Machine(kind="cpu", name="x86_64", count=1, multiprocessors=0, start=(STATE,), end=())
    with pytest.raises(ValidationError, match="driver"):
        Machine(kind="cpu", name="x86_64", count=1, driver="580", multiprocessors=0, start=(), end=())


def test_receipts_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_receipt([layer_row(8, 155_000)]).rows[0].bytes = 3  # type: ignore[misc]  # is what is tested


def test_the_schema_is_strict_and_names_its_version() -> None:
    schema = Receipt.json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["schema_version"]["const"] == 1
    assert {"commit", "machine", "ceilings", "rows"} <= set(schema["required"])
