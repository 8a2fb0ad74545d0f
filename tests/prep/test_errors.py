"""Holds the exceptions to the built-in types that callers catch."""

from __future__ import annotations

import pytest

from trellis_format.errors import FormatError, FormatValueError
from trellis_prep import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PrepValueError", ValueError),
        ("PrepTypeError", TypeError),
        ("PrepStateError", RuntimeError),
        ("PrepMemoryError", MemoryError),
        ("PrepDeviceError", RuntimeError),
        ("PrepReadError", ValueError),
    ],
)
def test_each_type_is_also_a_builtin_one(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    with pytest.raises(builtin, match="the message") as caught:
        raise kind("the message")
    assert isinstance(caught.value, errors.PrepError)


def test_read_error_is_of_both_packages_and_names_the_place() -> None:
    error = errors.PrepReadError("expert 3 up: truncated", file="a.safetensors", tensor="x.trellis")
    assert isinstance(error, FormatValueError)
    assert isinstance(error, FormatError)
    assert str(error) == "a.safetensors: x.trellis: expert 3 up: truncated"
    assert (error.message, error.file, error.tensor) == ("expert 3 up: truncated", "a.safetensors", "x.trellis")


def test_all_types_are_exported() -> None:
    defined = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert set(errors.__all__) == defined
