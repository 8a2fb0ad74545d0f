"""Holds strict schemas to their errors: each wrong key, JSON type and value is named by its path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.schema import StrictModel, emit_json, is_power_of_two, parse_model, refuse_key


class Leaf(StrictModel):
    size: Annotated[int, Field(gt=0)]
    word: Literal["a", "b"] = "a"
    factor: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Leaf:
        if self.size == 13:
            raise refuse_key("size", "must not be 13")
        return self


class Tree(StrictModel):
    version: Literal[2]
    flag: bool
    numbers: Annotated[tuple[int, ...], Field(strict=False)] = ()
    leaf: Leaf
    leaves: dict[str, Leaf] = Field(default_factory=dict)
    schema_name: str = Field(default="x", alias="schema")


GOOD: dict[str, Any] = {
    "version": 2,
    "flag": True,
    "numbers": [3, 1],
    "leaf": {"size": 4, "factor": 2},
    "leaves": {"7": {"size": 1, "word": "b"}},
    "schema": "y",
}


def with_value(path: str, value: Any) -> dict[str, Any]:
    data: dict[str, Any] = {**GOOD, "leaf": dict(GOOD["leaf"]), "leaves": {"7": dict(GOOD["leaves"]["7"])}}
    here: Any = data
    *parents, last = path.split(".")
    for key in parents:
        here = here[key]
    here[last] = value
    return data


def test_parse_then_emit_is_the_same_json() -> None:
    tree = parse_model(Tree, GOOD)
    assert emit_json(tree) == GOOD
    assert tree.numbers == (3, 1)
    assert tree.leaves["7"].word == "b"
    bare = {"version": 2, "flag": False, "leaf": {"size": 1}}
    assert emit_json(parse_model(Tree, bare)) == bare


@pytest.mark.parametrize(
    ("path", "value", "wanted", "got"),
    [
        ("version", True, "an integer", "bool"),
        ("version", 2.0, "an integer", "float"),
        ("version", "2", "an integer", "str"),
        ("flag", 1, "a boolean", "int"),
        ("flag", None, "a boolean", "NoneType"),
        ("numbers", {"0": 3}, "an array", "dict"),
        ("leaf", [4], "an object with string keys", "list"),
        ("leaf.size", 4.0, "an integer", "float"),
        ("leaf.size", None, "an integer", "NoneType"),
        ("leaf.word", 1, "a string", "int"),
        ("leaf.factor", None, "a number", "NoneType"),
        ("leaf.factor", True, "a number", "bool"),
        ("leaf.factor", "2", "a number", "str"),
        ("leaves", [], "an object", "list"),
        ("leaves.7", 3, "an object with string keys", "int"),
        ("leaves.7.size", "1", "an integer", "str"),
        ("schema", 3, "a string", "int"),
    ],
)
def test_wrong_json_types_are_type_errors_with_the_path(path: str, value: Any, wanted: str, got: str) -> None:
    with pytest.raises(FormatTypeError, match=rf"^shard: {path} must be {wanted}, got {got}$"):
        parse_model(Tree, with_value(path, value), file="shard")


def test_elements_of_arrays_are_named_by_place() -> None:
    with pytest.raises(FormatTypeError, match=r"^numbers\[1\] must be an integer, got bool$"):
        parse_model(Tree, with_value("numbers", [3, False]))
    with pytest.raises(FormatTypeError, match=r"^the document must be an object with string keys, got list$"):
        parse_model(Tree, [])
    with pytest.raises(FormatTypeError, match="object with string keys"):
        parse_model(Tree, {1: 2})


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("version", 3, r"version: Input should be 2, got '3'"),
        ("x", 1, r"x: unknown key"),
        ("leaf.x", {}, r"leaf\.x: unknown key"),
        ("leaves.7.y", None, r"leaves\.7\.y: unknown key"),
        ("leaf.size", 0, r"leaf\.size: Input should be greater than 0, got '0'"),
        ("leaf.size", 13, r"leaf\.size: must not be 13"),
        ("leaves.7.size", 13, r"leaves\.7\.size: must not be 13"),
        ("leaf.word", "c", r"leaf\.word: Input should be 'a' or 'b', got 'c'"),
        ("schema_name", "x", r"schema_name: unknown key"),
    ],
)
def test_wrong_keys_and_values_are_value_errors_with_the_path(path: str, value: Any, text: str) -> None:
    with pytest.raises(FormatValueError, match=rf"^shard: {text}$"):
        parse_model(Tree, with_value(path, value), file="shard")


def test_missing_keys_are_named() -> None:
    with pytest.raises(FormatValueError, match=r"^version: missing key; flag: missing key; leaf: missing key$"):
        parse_model(Tree, {})


def test_a_flood_of_problems_is_cut() -> None:
    data = {**GOOD, **{f"key{number}": 0 for number in range(20)}}
    with pytest.raises(FormatValueError, match=r"key4: unknown key \(and 15 more\)$"):
        parse_model(Tree, data)


def test_long_values_are_shown_in_part() -> None:
    with pytest.raises(FormatValueError) as caught:
        parse_model(Tree, with_value("leaf.word", "z" * 5000))
    assert len(str(caught.value)) < 200


def test_constructors_raise_type_errors_too() -> None:
    with pytest.raises(FormatTypeError, match="size must be an integer, got bool"):
        Leaf(size=True)
    with pytest.raises(ValidationError, match="must not be 13"):
        Leaf(size=13)
    assert Leaf(size=1, factor=None) == Leaf(size=1)


def test_models_are_frozen_and_their_repr_evaluates_back() -> None:
    leaf = Leaf(size=3, word="b", factor=0.5)
    assert eval(repr(leaf)) == leaf
    with pytest.raises(ValidationError, match="frozen"):
        leaf.size = 4


@pytest.mark.parametrize(("value", "power"), [(1, True), (2, True), (128, True), (0, False), (-2, False), (96, False)])
def test_powers_of_two(value: int, power: bool) -> None:
    assert is_power_of_two(value) is power
