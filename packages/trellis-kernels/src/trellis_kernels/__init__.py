"""Owns the arithmetic of trellis weights: every op behind one signature, in two backends.

It must not know checkpoints or plans.  Importing it needs neither a GPU nor nvidia-cutlass-dsl.  A name is imported
when it is first asked for: torch takes seconds to load, and the command must answer an interrupt.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trellis_format.lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, __all__, _MODULES)
