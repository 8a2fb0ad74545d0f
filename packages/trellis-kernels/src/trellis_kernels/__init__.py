"""Owns the arithmetic of trellis weights: every op behind one signature, in two backends.

It must not know checkpoints or plans.  Importing it needs neither a GPU nor nvidia-cutlass-dsl.  A name is imported
when it is first asked for: torch takes seconds to load, and the command must answer an interrupt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trellis_kernels.bank import CodeBank, code_banks
    from trellis_kernels.errors import (
        ColdKernelError,
        KernelError,
        KernelTypeError,
        KernelUnsupportedError,
        KernelValueError,
    )
    from trellis_kernels.ops import (
        BACKENDS,
        OPS,
        activate,
        backend_for,
        decode,
        grouped_gemm,
        pack_routes,
        reduce_routes,
        rotate_input,
        rotate_output,
    )
    from trellis_kernels.routes import BLOCK_ROWS, PackedRoutes, route_capacity

__all__ = [
    "BACKENDS",
    "BLOCK_ROWS",
    "OPS",
    "CodeBank",
    "ColdKernelError",
    "KernelError",
    "KernelTypeError",
    "KernelUnsupportedError",
    "KernelValueError",
    "PackedRoutes",
    "activate",
    "backend_for",
    "code_banks",
    "decode",
    "grouped_gemm",
    "pack_routes",
    "reduce_routes",
    "rotate_input",
    "rotate_output",
    "route_capacity",
]

_MODULES = ("errors", "routes", "ops", "bank")


def __getattr__(name: str) -> object:
    if name in __all__:
        for module in _MODULES:
            found = vars(importlib.import_module(f"{__name__}.{module}"))
            if name in found["__all__"]:
                return globals().setdefault(name, found[name])
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
