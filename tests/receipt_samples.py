"""Owns receipts of a GPU that was never there, for tests of what is made from receipts.  It must not assert."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trellis_moe.receipts.schema import (
    Ceiling,
    Check,
    DeviceState,
    LayerCase,
    Machine,
    Memory,
    OpCase,
    ParallelCase,
    PrepareCase,
    Ratio,
    Receipt,
    Row,
    Versions,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STATE = DeviceState(sm_clock_mhz=1980, memory_clock_mhz=3201, power_watts=120.5, temperature_celsius=41)
COPY = Ceiling(name="device copy", unit="bytes", work=4_000_000, samples_ns=(1000,) * 5)
"""4 TB/s."""
GEMM = Ceiling(name="bf16 GEMM", unit="flops", work=800_000_000, samples_ns=(1000,) * 5)
"""800 TFLOP/s."""


def samples(median: int, count: int = 5) -> tuple[int, ...]:
    """Times around a median, nanoseconds."""
    return tuple(median + step * max(median // 100, 1) for step in range(-(count // 2), count // 2 + 1))


def make_row(case: Any, median: int, *, nbytes: int = 1_000_000, flops: int = 0, **fields: Any) -> Row:
    """A row with its ratio to the copy."""
    ratio = Ratio(of=COPY.name, value=nbytes / median * 1e9 / COPY.rate)
    fields = {"weights": 0, "check": Check(reference="float64", error=1e-4, bound=1e-3), "ratios": (ratio,)} | fields
    return Row(case=case, samples_ns=samples(median), bytes=nbytes, flops=flops, **fields)


def layer_case(tokens: int = 8, **fields: Any) -> LayerCase:
    """GLM-4.5-Air, K=3 mul1, in a graph."""
    defaults: dict[str, Any] = {
        "geometry": "GLM-4.5-Air",
        "experts": 128,
        "hidden": 4096,
        "intermediate": 1408,
        "top_k": 8,
        "codebook": "mul1",
        "k": "3",
        "tokens": tokens,
        "io_dtype": "float16",
        "contender": "trellis",
        "arithmetic": "exact",
        "path": "moe_small",
        "mode": "graph",
    }
    return LayerCase(**(defaults | fields))


def layer_row(tokens: int, median: int, *, memory: Memory | None = None, **fields: Any) -> Row:
    """A row of that layer; a million operations for each nanosecond."""
    return make_row(layer_case(tokens, **fields), median, flops=median * 1000, memory=memory)


def op_row(op: str, case: str, median: int, nbytes: int = 1_000_000) -> Row:
    """A row of an op."""
    return make_row(OpCase(op=op, case=case, mode="graph"), median, nbytes=nbytes)


def parallel_row(ranks: int, tokens: int, median: int, **fields: Any) -> Row:
    """A row of GLM-4.5-Air on ranks."""
    case = {"scheme": "tp", "reduce": "all_reduce float32", "mode": "graph"} | fields
    return make_row(
        ParallelCase(geometry="GLM-4.5-Air", codebook="mul1", k="3", tokens=tokens, ranks=ranks, **case), median
    )


def preparation(
    layer: str, bound: int, *, share: float, host: int | None = 0, device: int | None = 0, layers: int = 1
) -> tuple[Ceiling, Row]:
    """A copy of 50 GB/s, and a preparation that reaches a share of it."""
    name = f"pinned copy beside {layer}, bound {bound / 2**20:g} MiB"
    copy = Ceiling(name=name, unit="bytes", work=50_000_000, samples_ns=(1_000_000,) * 5)
    median = round(1_000_000 / share)
    memory = Memory(
        planned_bytes=50_000_000,
        final_bytes=50_000_000,
        bound_bytes=bound,
        peak_host_bytes=host,
        peak_device_bytes=device,
    )
    row = Row(
        case=PrepareCase(layer=layer, layers=layers, bound_bytes=bound, code_bytes=49_000_000),
        samples_ns=(median,) * 5,
        bytes=50_000_000,
        flops=0,
        weights=0,
        check=Check(reference="a second read", error=0.0, bound=0.0),
        ratios=(Ratio(of=name, value=50_000_000 / median * 1e9 / copy.rate),),
        memory=memory,
    )
    return copy, row


def make_receipt(rows: Sequence[Row], *, ceilings: Sequence[Ceiling] = (), **fields: Any) -> Receipt:
    """A receipt of an H200."""
    defaults: dict[str, Any] = {
        "command": "trellis-moe bench all --out DIR",
        "commit": COMMIT,
        "dirty": False,
        "created": "2026-01-31T12:00:00Z",
        "machine": Machine(
            kind="cuda",
            name="NVIDIA H200",
            count=1,
            driver="580.1",
            multiprocessors=132,
            start=(STATE,),
            end=(STATE,),
        ),
        "versions": Versions(python="3.12.3", torch="2.11.0", cuda="13.0", dsl="4.8.1", trellis="0.1.0"),
        "ceilings": (COPY, GEMM, *ceilings),
        "rows": tuple(rows),
    }
    return Receipt(**(defaults | fields))


CPU = Machine(kind="cpu", name="x86_64", count=1, multiprocessors=0, start=(), end=())
"""The machine of a rehearsal."""
