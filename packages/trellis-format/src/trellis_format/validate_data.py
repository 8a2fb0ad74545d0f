"""Owns the checks that need tensor data: scales, biases and markers of EXL3 linears.  It must not check headers.

Codes are not read: any bits are a legal tile.  Linears are read in the order in which they lie in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError, FormatValueError
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.files.arrays import FileArray
from trellis_format.findings import Findings
from trellis_format.source import ExpertGeometry, Projection

__all__ = ["DATA_SUFFIXES", "check_linears", "data_bytes", "true_outputs"]

DATA_SUFFIXES = ("suh", "svh", "su", "sv", "bias", "mcg", "mul1")
"""Last name components of the tensors whose data is read."""
_SCALES = ("suh", "svh")
_OUTPUTS = ("svh", "bias")


def data_bytes(linears: Iterable[Exl3Linear]) -> int:
    """Bytes that `check_linears` reads."""
    return sum(tensor.nbytes for linear in linears for tensor in _parts(linear).values())


def true_outputs(geometry: ExpertGeometry, projection: Projection) -> int:
    """Output channels of an expert's linear without padding."""
    return geometry.hidden_size if projection is Projection.DOWN else geometry.intermediate_size


def check_linears(
    linears: Iterable[Exl3Linear],
    outputs: Mapping[str, int],
    findings: Findings,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> None:
    """Read scales, biases and markers, and add a finding for each that breaks a rule.

    Args:
        linears: sound by their headers.
        outputs: true output channels of linears whose padding is known, by name.
        findings: added to.
        on_bytes: told of each tensor that was read, in bytes.
    """
    for linear in sorted(linears, key=lambda linear: (linear.file, linear.trellis.entry.begin)):
        for suffix, tensor in _parts(linear).items():
            try:
                values = tensor.read()
            except FormatError as error:
                findings.error("unreadable", error)
            else:
                _check(linear, suffix, values, outputs.get(linear.name), findings)
            if on_bytes is not None:
                on_bytes(tensor.nbytes)


def _parts(linear: Exl3Linear) -> dict[str, FileArray]:
    return {suffix: linear.tensors[suffix] for suffix in DATA_SUFFIXES if suffix in linear.tensors}


def _check(
    linear: Exl3Linear, suffix: str, values: npt.NDArray[np.generic], outputs: int | None, findings: Findings
) -> None:
    if suffix == linear.codebook.marker:
        try:
            linear.check_marker()
        except FormatError as error:
            findings.error("marker-value", error)
    if suffix in _SCALES or suffix == "bias":
        with np.errstate(over="ignore"):  # a float32 bias is taken as float16
            halves = values.astype(np.float16)
        _check_finite(linear, suffix, halves, findings)
        if outputs is not None and suffix in _OUTPUTS:
            _check_padding(linear, suffix, halves, outputs, findings)


def _check_finite(linear: Exl3Linear, suffix: str, values: npt.NDArray[np.float16], findings: Findings) -> None:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        first = int(bad[0])
        error = FormatValueError(
            f"all values must be finite in float16; {bad.size} of {values.size} are not, first at index {first} "
            f"({values[first]})",
            file=linear.tensors[suffix].file,
            tensor=f"{linear.name}.{suffix}",
            numbers={"index": first, "count": bad.size, "length": values.size},
        )
        findings.error("bias-not-finite" if suffix == "bias" else "scale-not-finite", error)


def _check_padding(
    linear: Exl3Linear, suffix: str, values: npt.NDArray[np.float16], outputs: int, findings: Findings
) -> None:
    bad = np.flatnonzero(values[outputs:])
    if bad.size:
        first = outputs + int(bad[0])
        error = FormatValueError(
            f"channels from {outputs} on are padding and must be zero; {bad.size} of {linear.n - outputs} are not, "
            f"first at index {first} ({values[first]})",
            file=linear.tensors[suffix].file,
            tensor=f"{linear.name}.{suffix}",
            numbers={"index": first, "count": bad.size, "true": outputs, "stored": linear.n},
        )
        findings.error("padding-not-zero", error)
