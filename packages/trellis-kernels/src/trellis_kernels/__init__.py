"""Owns the arithmetic of trellis weights: every op behind one signature, in two backends.

It must not know checkpoints or plans.  Importing it needs neither a GPU nor nvidia-cutlass-dsl.
"""

from __future__ import annotations

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
