"""Owns calls of a compiled function whose arguments stay in place between calls.  It must not know any kernel.

The DSL turns Python values into C ones at every call, 4 to 6 us an argument.  Here that happens once; a later call
writes the few values that changed into the same storage and hands over the same pointers.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cutlass import Float32, Int32, Int64

from trellis_kernels.cute.argument_tuples import blank, kinds

__all__ = ["ArgumentSlots"]

_STORED: dict[Any, Any] = {Int64: ctypes.c_int64, Int32: ctypes.c_int32, Float32: ctypes.c_float}


class ArgumentSlots:
    """A compiled function and storage for its arguments.  Calls of one instance must not overlap.

    Args:
        kernel: what `compiler.ready` returned.
        arguments: the tuple that it takes; a stream follows it.
        stream: a stream object of the driver bindings, whose own storage is the last argument's.
    """

    def __init__(self, kernel: Any, arguments: type[tuple[Any, ...]], stream: Any) -> None:
        stored = {name: _STORED[kind] for name, kind in kinds(arguments).items()} | {"stream": ctypes.c_int64}
        self._kernel = kernel
        self._kept = (blank(arguments), stream)
        self._pointers, self._owners = kernel.execution_args.generate_execution_args(self._kept, {})
        self._slots = {
            name: kind.from_address(_address(pointer))
            for (name, kind), pointer in zip(stored.items(), self._pointers, strict=True)
        }

    def set(self, **values: int | float) -> None:
        """Change arguments by name; `stream` is the handle of one."""
        for name, value in values.items():
            self._slots[name].value = value

    def __call__(self) -> None:
        """Call with what the slots hold."""
        self._kernel.run_compiled_program(self._pointers)


def _address(pointer: Any) -> int:
    address: int = pointer if isinstance(pointer, int) else pointer.value
    return address
