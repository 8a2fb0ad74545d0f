"""Owns the ahead-of-time compilation report: what every kernel of a list costs, compiled over several processes.

It must not know any kernel, nor how a report is printed.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from typing import Any

from trellis_kernels.cute import compiler
from trellis_kernels.cute.keys import KernelKey
from trellis_kernels.cute.resources import read_resources

__all__ = ["KernelReport", "compile_reports", "report_kernel"]


@dataclass(frozen=True)
class KernelReport:
    """The outcome of compiling one key.

    Attributes:
        key: what was compiled.
        seconds: wall time of the compilation, without the import of the DSL.
        registers: 32-bit registers of a thread.
        stack_bytes: local memory of a thread, bytes; above 0 the kernel spills.
        shared_bytes: shared memory of a block, bytes, what the binary declares plus what the launch asks for.
        code_bytes: machine code, bytes.
        error: why there is no binary, or None; the counts are then 0.
    """

    key: KernelKey
    seconds: float
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    code_bytes: int = 0
    error: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it compiled and does not spill."""
        return self.error is None and self.stack_bytes == 0

    def as_row(self) -> dict[str, Any]:
        """The report as a flat JSON-ready record, the fields of the key included."""
        row = asdict(self)
        fields = row.pop("key")
        return {"kernel": self.key.kernel, **fields, **row}


def report_kernel(key: KernelKey) -> KernelReport:
    """Compile one key in this process and read its resources; an exception becomes the report's error."""
    start = time.perf_counter()
    try:
        kernels = read_resources(compiler.build_cubin(key))
    except Exception as error:  # noqa: BLE001  # the DSL raises many types, and one failure must not hide the others
        return KernelReport(key, time.perf_counter() - start, error=f"{type(error).__name__}: {error}")
    return KernelReport(
        key,
        time.perf_counter() - start,
        registers=max(kernel.registers for kernel in kernels),
        stack_bytes=max(kernel.stack_bytes for kernel in kernels),
        shared_bytes=max(kernel.shared_bytes for kernel in kernels) + key.dynamic_shared_bytes,
        code_bytes=sum(kernel.code_bytes for kernel in kernels),
    )


def compile_reports(keys: Sequence[KernelKey], *, jobs: int | None = None) -> Iterator[KernelReport]:
    """Compile every key and yield each report as it is done, in no fixed order.

    Args:
        keys: what to compile.
        jobs: processes; None means one for each CPU, and 1 means this process.
    """
    workers = min(jobs or os.cpu_count() or 1, len(keys))
    if workers <= 1:
        yield from map(report_kernel, keys)
        return
    # a forked child would share the parent's CUDA and MLIR state, so each worker starts clean
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(report_kernel, key) for key in keys]):
            yield future.result()
