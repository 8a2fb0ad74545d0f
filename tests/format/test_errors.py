"""Holds the exception types to their built-in bases and to what a message shows."""

from __future__ import annotations

import pickle

import pytest

from trellis_format.errors import (
    FormatError,
    FormatNotFoundError,
    FormatTypeError,
    FormatUnsupportedError,
    FormatValueError,
)

PAIRS = [
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
