"""Holds the exception types to what callers catch."""

from __future__ import annotations

import pytest

from trellis_moe import (
    MoeDistributedError,
    MoeError,
    MoeMemoryError,
    MoeTypeError,
    MoeUnsupportedError,
    MoeValueError,
)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (MoeValueError, ValueError),
        (MoeTypeError, TypeError),
        (MoeUnsupportedError, NotImplementedError),
        (MoeDistributedError, RuntimeError),
        (MoeMemoryError, MemoryError),
    ],
)
def test_each_error_is_caught_by_the_base_and_by_the_builtin(kind: type[Exception], builtin: type[Exception]) -> None:
    for caught in (MoeError, builtin):
        with pytest.raises(caught, match="3 is not 4"):
            raise kind("3 is not 4")
    assert not issubclass(builtin, MoeError)
