"""Holds the exceptions to the built-in types that callers catch."""

from __future__ import annotations

import pytest

from trellis_prep import errors


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("PrepValueError", ValueError),
        ("PrepTypeError", TypeError),
        ("PrepUnsupportedError", NotImplementedError),
    ],
)
def test_each_type_is_also_a_builtin_one(name: str, builtin: type[Exception]) -> None:
    kind = getattr(errors, name)
    with pytest.raises(builtin, match="the message") as caught:
        raise kind("the message")
    assert isinstance(caught.value, errors.PrepError)


def test_all_types_are_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(errors.__all__) == defined
