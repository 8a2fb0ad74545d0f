"""Holds the exception types to their built-in bases and to what a message shows."""

from __future__ import annotations

import pickle

import pytest

from trellis_format.errors import (
    MAX_MESSAGE_CHARACTERS,
    MAX_VALUE_CHARACTERS,
    FormatArgumentError,
    FormatError,
    FormatNotFoundError,
    FormatTypeError,
    FormatUnsupportedError,
    FormatValueError,
    bounded,
    in_file,
)

PAIRS = [
    (FormatArgumentError, ValueError),
    (FormatValueError, ValueError),
    (FormatTypeError, TypeError),
    (FormatUnsupportedError, NotImplementedError),
    (FormatNotFoundError, FileNotFoundError),
]


@pytest.mark.parametrize(("own", "builtin"), PAIRS)
def test_each_error_is_caught_as_its_builtin_and_as_the_packages(own: type[FormatError], builtin: type) -> None:
    for base in (builtin, FormatError):
        with pytest.raises(base, match=r"^the fact$"):
            raise own("the fact")


@pytest.mark.parametrize(("own", "_"), PAIRS)
def test_message_names_file_then_tensor(own: type[FormatError], _: type) -> None:
    error = own("the fact", file="a/b.safetensors", tensor="x.suh")
    assert str(error) == "a/b.safetensors: x.suh: the fact"
    assert (error.message, error.file, error.tensor) == ("the fact", "a/b.safetensors", "x.suh")


@pytest.mark.parametrize(
    ("file", "tensor", "text"),
    [(None, None, "fact"), ("f", None, "f: fact"), (None, "t", "t: fact"), ("", "", "fact")],
)
def test_missing_places_leave_no_separator(file: str | None, tensor: str | None, text: str) -> None:
    assert str(FormatValueError("fact", file=file, tensor=tensor)) == text


@pytest.mark.parametrize(("own", "_"), PAIRS)
def test_errors_survive_pickling(own: type[FormatError], _: type) -> None:
    error = pickle.loads(pickle.dumps(own("fact", file="f", tensor="t")))
    assert type(error) is own
    assert str(error) == "f: t: fact"
    assert (error.file, error.tensor) == ("f", "t")


@pytest.mark.parametrize("value", ["a" * 5000, "b c" * 5000, "'quoted' " * 2000])
def test_values_are_cut_and_what_follows_them_stays(value: str) -> None:
    error = FormatValueError(f"key {value!r} is not one of 3", tensor=value)
    assert error.message.startswith(f"key {value!r:.30}")
    assert error.message.endswith(" is not one of 3")
    assert f"({len(repr(value))} characters)" in error.message
    assert len(error.message) < MAX_VALUE_CHARACTERS + 50
    assert error.tensor is not None
    assert error.tensor.endswith(f" ... ({len(value)} characters)")
    assert len(error.tensor) == MAX_VALUE_CHARACTERS
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_message_of_many_values_is_cut_as_a_whole() -> None:
    short = "layer 7: the trellis is " + ", ".join(f"{number} words" for number in range(10))
    assert bounded(short) == short
    long = "word " * 1_000_000
    assert len(bounded(long)) == MAX_MESSAGE_CHARACTERS
    assert "characters)" in bounded(long)
    whole = "x" * MAX_VALUE_CHARACTERS
    assert bounded(f"{whole} y") == f"{whole} y"


def test_a_file_is_named_once() -> None:
    with pytest.raises(FormatValueError, match=r"^a/b: t: 3 is not 4$") as caught, in_file("a/b"):
        raise FormatValueError("3 is not 4", tensor="t", numbers={"observed": 3})
    assert (caught.value.file, caught.value.tensor, caught.value.numbers) == ("a/b", "t", {"observed": 3})
    with pytest.raises(FormatValueError, match=r"^c: 3$"), in_file("a/b"):
        raise FormatValueError("3", file="c")
