"""Holds arrays of other libraries to sharing their memory, and to being on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.files.arrays import MemoryArray
from trellis_format.files.host import as_array, as_view


class Foreign:
    """An array of another library that exchanges memory by DLPack."""

    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **options: Any) -> object:
        return self._array.__dlpack__(**options)


def test_numpy_arrays_are_themselves() -> None:
    array = np.zeros(3)
    assert as_array("x", array) is array
    view = as_view("x", array)
    assert isinstance(view, MemoryArray)
    assert view.read() is array
    assert as_view("x", view) is view


def test_foreign_arrays_share_their_memory() -> None:
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    found = as_array("x", Foreign(array))
    assert found.ctypes.data == array.ctypes.data
    assert np.array_equal(found, array)
    assert as_view("x", Foreign(array)).read().ctypes.data == array.ctypes.data


@pytest.mark.parametrize("make", [as_array, as_view])
def test_arrays_on_a_device_are_refused(make: Any) -> None:
    with pytest.raises(FormatValueError, match="codes must be on the CPU, got DLPack device type 2, index 1"):
        make("codes", Foreign(np.zeros(3), (2, 1)))


@pytest.mark.parametrize("value", [[1, 2], None, 3, "codes", b"codes"])
def test_other_objects_are_refused(value: object) -> None:
    with pytest.raises(FormatTypeError, match=f"rate must be an array, got {type(value).__name__}"):
        as_array("rate", value)


class Refusing(Foreign):
    """An array whose library does not share it: of a dtype that numpy lacks, or without memory."""

    dtype = "library.bfloat16"

    def __init__(self, error: Exception, *, at_device: bool) -> None:
        super().__init__(np.zeros(3))
        self._error = error
        self._at_device = at_device

    def __dlpack_device__(self) -> tuple[int, int]:
        if self._at_device:
            raise self._error
        return super().__dlpack_device__()

    def __dlpack__(self, **options: Any) -> object:
        raise self._error


@pytest.mark.parametrize("at_device", [True, False])
@pytest.mark.parametrize("kind", [BufferError, RuntimeError, ValueError, TypeError, NotImplementedError])
def test_arrays_that_cannot_be_shared_are_named(kind: type[Exception], at_device: bool) -> None:
    with pytest.raises(FormatTypeError, match=r"codes must be .*, got library\.bfloat16: no such type") as caught:
        as_array("codes", Refusing(kind("no such type"), at_device=at_device))
    assert isinstance(caught.value.__cause__, kind)
