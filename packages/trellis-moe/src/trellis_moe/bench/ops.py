"""Owns the measurement of single ops into rows.  It must not know which cases there are."""

from __future__ import annotations

from trellis_kernels.bench.op_cases import OpSizes, cases
from trellis_kernels.bench.ops import measure
from trellis_moe.bench.record import Recorder
from trellis_moe.receipts.schema import Check, OpCase

__all__ = ["GPU_SIZES", "TINY_SIZES", "measure_ops"]

GPU_SIZES = OpSizes(
    rates=("4",), rows=(4096,), packs=((4096, 16, 896, 64), (16, 8, 128, 16)), tokens=(1024,)
)  # fmt: skip
"""What is measured on a GPU: what is asked for, and sums."""
TINY_SIZES = OpSizes(
    decode=(64, 96), rates=("4",), hidden=512, rows=(3,), packs=((33, 3, 7, 8),), tokens=(5,)
)  # fmt: skip
"""What a CPU runs in milliseconds; for rehearsals."""

_REFERENCES = {
    "decode": "trellis_format, bit for bit, three bands of tiles",
    "rotate_input": "float64 Hadamard, sixteen rows of every input",
    "rotate_output": "float64 Hadamard, sixteen rows of every input",
    "pack_routes": "numpy stable sort, every route",
    "reduce_routes": "float64 sums, sixteen tokens of every input",
}


def measure_ops(recorder: Recorder, group: str, sizes: OpSizes) -> None:
    """Record every case of a group.

    Args:
        recorder: takes the rows.
        group: a key of `trellis_kernels.bench.op_cases.GROUPS`.
        sizes: how large.

    Raises:
        ValueError: if an output is outside its bound.
    """
    for case in cases(group, sizes, recorder.device):
        row = measure(case, recorder.device, count=recorder.samples)
        error = float("inf") if row.error is None else row.error
        recorder.add_row(
            OpCase(op=row.op, case=row.case, mode=recorder.mode),
            row.samples,
            nbytes=row.moved_bytes,
            flops=0,
            weights=row.weights,
            check=Check(reference=_REFERENCES[row.op], error=error, bound=row.bound),
        )
