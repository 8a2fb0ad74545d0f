"""Owns the container-independent description of one layer's experts.  It must not know which container it came from.

`TrellisSource` says what the codes mean and where they lie; `TrellisWeights` are the CPU arrays it describes.  The
planner reads the source alone; preparation reads both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import BLOCK, TrellisExtent
from trellis_format.files.arrays import ArrayView
from trellis_format.rate_table import RateTable
from trellis_format.transform import ExpertTransform

__all__ = ["CodeLayout", "ExpertGeometry", "Projection", "TrellisSource", "TrellisWeights"]


class _Named(StrEnum):
    def __repr__(self) -> str:  # evaluates back, as the repr of what holds it must
        return f"{type(self).__name__}.{self.name}"


class Projection(_Named):
    """The linears of an expert, in the order of every table."""

    GATE = "gate"
    UP = "up"
    DOWN = "down"


class CodeLayout(_Named):
    """How codes lie in memory or in a file."""

    EXL3_LINEAR = "exl3-linear"
    """One array per expert and projection, `[k_tiles, n_tiles, 16*K] int16`."""
    SLOT_MAJOR = "slot-major"
    """One array, `[slots, row_bytes] uint8`, each row the bundles of all experts."""


@dataclass(frozen=True, kw_only=True)
class ExpertGeometry:
    """Sizes of one layer's routed experts.

    Args:
        num_experts: experts of the layer.
        hidden_size: channels that an expert takes and gives.
        intermediate_size: channels between the two GEMMs, over all ranks.
        padded_hidden_size: hidden channels as stored, a multiple of 128.
        padded_intermediate_size: intermediate channels as stored, a multiple of 128.
        projections: the linears of an expert: gate, up, down, or up, down where there is no gate.

    Raises:
        FormatTypeError: if a size is not an int.
        FormatValueError: if a size is not positive, padding is not to the next multiples of 128, or the projections
            are not one of the two sets.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    padded_hidden_size: int
    padded_intermediate_size: int
    projections: tuple[Projection, ...] = (Projection.GATE, Projection.UP, Projection.DOWN)

    def __post_init__(self) -> None:
        for name in (
            "num_experts", "hidden_size", "intermediate_size", "padded_hidden_size", "padded_intermediate_size",
        ):  # fmt: skip
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise FormatTypeError(f"{name} must be an int, got {type(size).__name__}")
            if size <= 0:
                raise FormatValueError(f"{name} must be positive, got {size}")
        for axis in ("hidden_size", "intermediate_size"):
            size, padded = getattr(self, axis), getattr(self, f"padded_{axis}")
            if padded != -(-size // BLOCK) * BLOCK:
                legal = -(-size // BLOCK) * BLOCK
                raise FormatValueError(f"{axis} {size} is stored in {legal} channels, not in {padded}")
        if self.projections not in (tuple(Projection), (Projection.UP, Projection.DOWN)):
            raise FormatValueError(f"projections must be gate, up, down or up, down; got {self.projections}")

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return Projection.GATE in self.projections

    def matrix(self, projection: Projection) -> tuple[int, int]:
        """(k, n) of one expert's linear: padded input by padded output channels, over all ranks."""
        if projection is Projection.DOWN:
            return self.padded_intermediate_size, self.padded_hidden_size
        return self.padded_hidden_size, self.padded_intermediate_size


@dataclass(frozen=True, kw_only=True)
class TrellisSource:
    """What one layer's codes and scales mean.

    Args:
        codebook: name of the one codebook of the layer.
        geometry: sizes.
        rates: K of every expert and projection.
        layout: how the codes lie.
        extent: the part of the intermediate axis that the weights cover.
        shared_input_scales: whether all experts share the input vectors (then `[H]` or `[2, H]`).
        joint_input_scales: whether gate and up share one input vector, so that one rotated activation serves both.
        shared_output_scales: whether all experts share the output vector (then `[H]`).
        biased: the projections whose linears carry a bias.
        up_divisor: the number by which the stored up projection was divided; the route weight makes up for it.
        activation: law between the GEMMs, as the model's configuration states it; None where it does not.
        expert_transform: the intermediate Hadamard that the experts were quantised under, or None.

    Raises:
        FormatTypeError: if a field has the wrong type.
        FormatValueError: if the codebook is unknown, a rate is not legal for it, the rate table does not fit the
            geometry, or the extent is of another axis or cuts a Hadamard block; or if experts under an intermediate
            Hadamard have no gate, a bias, padding, or two input vectors.
    """

    codebook: str
    geometry: ExpertGeometry
    rates: RateTable
    layout: CodeLayout
    extent: TrellisExtent
    shared_input_scales: bool = False
    joint_input_scales: bool = False
    shared_output_scales: bool = False
    biased: tuple[Projection, ...] = ()
    up_divisor: float = 1.0
    activation: Activation | None = None
    expert_transform: ExpertTransform | None = None

    def __post_init__(self) -> None:
        for name, kind in (
            ("codebook", str), ("geometry", ExpertGeometry), ("rates", RateTable), ("layout", CodeLayout),
            ("extent", TrellisExtent), ("biased", tuple), ("up_divisor", (int, float)),
            ("activation", (Activation, type(None))), ("expert_transform", (ExpertTransform, type(None))),
        ):  # fmt: skip
            if not isinstance(getattr(self, name), kind):
                raise FormatTypeError(f"source {name} has the wrong type {type(getattr(self, name)).__name__}")
        codebook = get_codebook(self.codebook)
        for rate in self.rates.distinct():
            codebook.check_rate(rate)
        self.rates.check_shape(self.geometry.num_experts, len(self.geometry.projections))
        if self.extent.global_intermediate_size != self.geometry.padded_intermediate_size:
            raise FormatValueError(
                f"extent is of an axis of {self.extent.global_intermediate_size} channels, the experts have "
                f"{self.geometry.padded_intermediate_size}"
            )
        self.extent.check_blocks()
        if self.biased != tuple(name for name in self.geometry.projections if name in self.biased):
            raise FormatValueError(f"biased {self.biased} must be in order, of {self.geometry.projections}")
        if not 0 < self.up_divisor < math.inf:
            raise FormatValueError(f"up_divisor {self.up_divisor} must be above 0 and finite")
        if self.expert_transform is not None:
            self._check_transform(self.expert_transform)

    def _check_transform(self, transform: ExpertTransform) -> None:
        geometry = self.geometry
        transform.check(geometry.padded_hidden_size, self.extent)
        padded = geometry.padded_hidden_size - geometry.hidden_size
        padded += geometry.padded_intermediate_size - geometry.intermediate_size
        for wrong, fact in (
            (not geometry.gated, "experts have no gate"),
            (bool(self.biased), f"{', '.join(self.biased)} has a bias"),
            (padded > 0, f"{padded} channels are padding"),
            (not self.joint_input_scales, "gate and up have an input vector each"),
        ):
            if wrong:
                raise FormatValueError(
                    f"intermediate Hadamard: {fact}; it needs a gate, no bias, no padding, and one input vector"
                )

    def code_bytes(self, extent: TrellisExtent | None = None) -> int:
        """Bytes of all codes of a share of the intermediate axis (default: what the weights cover)."""
        return sum(self.expert_code_bytes(expert, extent) for expert in range(self.geometry.num_experts))

    def expert_code_bytes(self, expert: int, extent: TrellisExtent | None = None) -> int:
        """Bytes of one expert's codes: slots * sum over projections of (H/16) * 64 K."""
        width = (extent or self.extent).width
        half_bits = sum(self.rates.rate(expert, index).half_bits for index in range(len(self.geometry.projections)))
        return width * self.geometry.padded_hidden_size // 16 * half_bits


@dataclass(frozen=True, kw_only=True, eq=False)
class TrellisWeights:
    """The CPU arrays of one layer's experts, over the source's extent (I = its width, H = padded hidden size).

    Args:
        codes: for `exl3-linear`, `[experts][projections]` views of `[k_tiles, n_tiles, 16*K] int16`; for
            `slot-major`, one view of `[slots, row_bytes] uint8`.
        rate: `[1]`, `[experts]` or `[experts, projections] uint8`, rate bytes.
        input_scales: `[experts, fc1, H] float16`, fc1 = gate, up (1 row where gate and up share it, or without a
            gate); without the experts axis where experts share it.
        intermediate_scales: `[experts, projections, I] float16`: gate svh, up svh, down suh.
        output_scales: `[experts, H] float16`, or `[H]` where experts share it.
        biases: `{projection: [experts, n] float16}` after the output scale, or empty.
        expert_sign_patterns: `[experts] uint8`, 0 to 7, the signs of each expert's intermediate Hadamard; None without.
    """

    codes: tuple[tuple[ArrayView, ...], ...] | ArrayView
    rate: npt.NDArray[np.uint8]
    input_scales: npt.NDArray[np.float16]
    intermediate_scales: npt.NDArray[np.float16]
    output_scales: npt.NDArray[np.float16]
    biases: dict[Projection, npt.NDArray[np.float16]]
    expert_sign_patterns: npt.NDArray[np.uint8] | None = None

    def code_view(self, expert: int, projection: int) -> ArrayView:
        """The codes of one expert's linear in `exl3-linear` layout.

        Raises:
            FormatTypeError: if the codes are slot-major.
        """
        if isinstance(self.codes, ArrayView):
            raise FormatTypeError("codes are slot-major; there is no view of one linear")
        return self.codes[expert][projection]

    def scale_arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The scale and bias arrays by name."""
        named = {
            "input_scales": self.input_scales,
            "intermediate_scales": self.intermediate_scales,
            "output_scales": self.output_scales,
        }
        return named | {f"bias.{projection}": array for projection, array in self.biases.items()}
