"""Owns calls of a compiled function whose arguments stay in place between calls.  It must not know any kernel.

The DSL turns Python values into C ones at every call, 4 to 6 us an argument.  Here that happens once; a later call
writes the few values that changed into the same storage and hands over the same pointers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

__all__ = ["ArgumentSlots"]

_KINDS: dict[str, Any] = {"address": ctypes.c_int64, "int": ctypes.c_int32, "float": ctypes.c_float}


class ArgumentSlots:
    """A compiled function and storage for its arguments.  Calls of one instance must not overlap.

    Args:
        kernel: what `compiler.ready` returned.
        kinds: for each argument `address`, `int` or `float`; a stream follows them.
        stream: a stream object of the driver bindings, whose own storage is the last argument's.
    """

    def __init__(self, kernel: Any, kinds: Sequence[str], stream: Any) -> None:
        values = [0.0 if kind == "float" else 0 for kind in kinds]
        self._kernel = kernel
        self._stream = stream
        self._pointers, self._owners = kernel.execution_args.generate_execution_args((*values, stream), {})
        self._slots = [
            _KINDS[kind].from_address(_address(pointer)) for kind, pointer in zip(kinds, self._pointers, strict=False)
        ]
        self._slots.append(ctypes.c_int64.from_address(_address(self._pointers[len(kinds)])))

    def set(self, index: int, value: int | float) -> None:
        """Change one argument; the stream's index is the number of the others, its value the handle."""
        self._slots[index].value = value

    def __call__(self) -> None:
        """Call with what the slots hold."""
        self._kernel.run_compiled_program(self._pointers)


def _address(pointer: Any) -> int:
    address: int = pointer if isinstance(pointer, int) else pointer.value
    return address
