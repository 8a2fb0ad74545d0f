"""Holds the exception types to the built-ins that callers catch."""

from __future__ import annotations

import pytest

from trellis_kernels import errors


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.KernelValueError, ValueError),
        (errors.KernelTypeError, TypeError),
        (errors.KernelUnsupportedError, NotImplementedError),
        (errors.ColdKernelError, RuntimeError),
    ],
)
def test_each_error_is_the_packages_own_and_a_builtin(error: type[Exception], builtin: type[Exception]) -> None:
    with pytest.raises(builtin, match="width 3") as caught:
        raise error("width 3")
    assert isinstance(caught.value, errors.KernelError)


def test_every_error_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == set(errors.__all__)
