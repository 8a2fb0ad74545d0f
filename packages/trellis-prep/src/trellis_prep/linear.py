"""Owns the preparation of one linear outside the experts: its layout, its bytes through the ring, its device tensors.

It must not know kernels, containers, or what the linear is for.  The codes keep their stored tile order, as those of
experts do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.decoded import StoredLinear
from trellis_format.rates import TILE, Rate
from trellis_prep.devices import resolve_device
from trellis_prep.errors import PrepTypeError, PrepValueError
from trellis_prep.lanes import Move
from trellis_prep.layout import TensorSpec
from trellis_prep.loads import flat_bytes
from trellis_prep.preparation import Progress, stream_tensors
from trellis_prep.stage import StagingBuffer
from trellis_prep.staging import TrellisStaging, plan_slots
from trellis_prep.transfer import Load, Read

__all__ = ["LinearLayout", "LinearPlan", "PreparedLinear", "plan_linear", "prepare_linear"]

_VECTORS = ("input_scale", "output_scale", "bias")


@dataclass(frozen=True)
class LinearLayout:
    """The tensors of a prepared linear.

    Attributes:
        codebook: its name.
        rate: K.
        k: stored input channels.
        n: stored output channels.
        biased: whether it has a bias.
    """

    codebook: str
    rate: Rate
    k: int
    n: int
    biased: bool

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Codes, scales, and the bias where there is one."""
        codes = TensorSpec("codes", (self.k // TILE, self.n // TILE, self.rate.tile_words16), "int16")
        vectors = {"input_scale": self.k, "output_scale": self.n} | ({"bias": self.n} if self.biased else {})
        return (codes, *(TensorSpec(name, (1, channels), "float16") for name, channels in vectors.items()))

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class LinearPlan:
    """What the preparation of a linear will take.

    Attributes:
        layout: its tensors.
        staging: the bounds.
        slots: host slots.
        slot_bytes: bytes of each.
    """

    layout: LinearLayout
    staging: TrellisStaging
    slots: int
    slot_bytes: int


@dataclass(frozen=True, eq=False)
class PreparedLinear:
    """One linear on its device.  Owns its storage.

    Attributes:
        codebook: its name.
        rate: K.
        codes: `[k_tiles, n_tiles, 16*K] int16`.
        input_scale: `[1, k] float16`.
        output_scale: `[1, n] float16`.
        bias: `[1, n] float16`, added after the output scale, or None.
    """

    codebook: str
    rate: Rate
    codes: torch.Tensor
    input_scale: torch.Tensor
    output_scale: torch.Tensor
    bias: torch.Tensor | None

    @property
    def k(self) -> int:
        """Stored input channels, a multiple of 128."""
        return self.input_scale.shape[1]

    @property
    def n(self) -> int:
        """Stored output channels, a multiple of 128."""
        return self.output_scale.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = (self.codes, self.input_scale, self.output_scale, self.bias)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def plan_linear(linear: StoredLinear, *, staging: TrellisStaging | None = None) -> LinearPlan:
    """Plan the preparation of a linear from its headers.

    Args:
        linear: a linear of any container.
        staging: bounds on host slots; default 64 MiB.

    Raises:
        PrepTypeError: if an argument has the wrong type.
        PrepValueError: if the bound is below one tile ("insufficient"); names both numbers.
    """
    if not isinstance(linear, StoredLinear):
        raise PrepTypeError(f"linear must be a StoredLinear, got {type(linear).__name__}")
    bounds = TrellisStaging() if staging is None else staging
    if not isinstance(bounds, TrellisStaging):
        raise PrepTypeError(f"staging must be a TrellisStaging, got {type(bounds).__name__}")
    k, n = linear.shape
    layout = LinearLayout(linear.codebook.name, linear.rate, k, n, linear.bias is not None)
    if bounds.max_bytes < linear.rate.tile_bytes:
        raise PrepValueError(
            f"staging of {bounds.max_bytes} bytes is insufficient: codes of K = {linear.rate} are moved in tiles of "
            f"{linear.rate.tile_bytes} bytes"
        )
    slots, slot_bytes = plan_slots(layout.tensors[0].nbytes, bounds)
    if slot_bytes < linear.rate.tile_bytes:  # half the bound holds no tile, the whole does
        slots, slot_bytes = 1, linear.rate.tile_bytes
    return LinearPlan(layout, bounds, slots, slot_bytes)


def prepare_linear(
    linear: StoredLinear,
    *,
    device: torch.device | str | None = None,
    staging: TrellisStaging | None = None,
    progress: Progress | None = None,
    poison: bool = False,
    buffer: StagingBuffer | None = None,
) -> PreparedLinear:
    """Put a linear on a device.

    It holds at most `staging.max_bytes` of codes on the host and needs no device memory beyond the prepared tensors.

    Args:
        linear: a linear of any container.
        device: destination, "cpu" (default) or a CUDA device.
        staging: bounds on host slots; default 64 MiB.
        progress: called with (bytes done, bytes in all) after each slot's copies were issued.
        poison: overwrite staging slots after their release, to find late readers.
        buffer: host memory that is kept from one preparation to the next; None takes its own for this one.

    Raises:
        PrepTypeError: if an argument has the wrong type.
        PrepValueError: if the device cannot be used, or the bound is below one tile ("insufficient").
        FormatValueError: if a file is short or changed, or a scale or the bias is not finite.
        PrepMemoryError: if memory runs out on the host or the device; names what for.
        PrepDeviceError: if a copy fails.
        PrepStateError: if a CUDA graph is being captured, or the buffer is in use or closed.
    """
    plan = plan_linear(linear, staging=staging)
    target = resolve_device(device)
    tensors = stream_tensors(
        plan,
        target,
        lambda tensors: _loads(plan, linear, tensors),
        progress=progress,
        poison=poison,
        buffer=buffer,
    )
    return PreparedLinear(
        codebook=plan.layout.codebook,
        rate=plan.layout.rate,
        codes=tensors["codes"],
        input_scale=tensors["input_scale"],
        output_scale=tensors["output_scale"],
        bias=tensors.get("bias"),
    )


def _loads(plan: LinearPlan, linear: StoredLinear, tensors: Mapping[str, torch.Tensor]) -> Iterator[Load]:
    """The scales and the bias, then the codes: whole tile rows where a slot holds one, else parts of a row."""
    for name, read in zip(_VECTORS, (linear.suh, linear.svh, linear.bias), strict=True):
        if read is None:
            continue
        values = np.ascontiguousarray(read(), dtype=np.float16).view(np.uint8)
        target = flat_bytes(tensors[name])
        for first in range(0, values.size, plan.slot_bytes):
            part = values[first : first + plan.slot_bytes]
            yield _load(f"{linear.name}.{name}", partial(_copy, part), target[first : first + part.size])
    codes = flat_bytes(tensors["codes"])
    k_tiles, n_tiles, words = tensors["codes"].shape
    tile_bytes = linear.rate.tile_bytes
    width = min(n_tiles, plan.slot_bytes // tile_bytes)
    height = max(plan.slot_bytes // (n_tiles * tile_bytes), 1)
    for top in range(0, k_tiles, height):
        bottom = min(top + height, k_tiles)
        for left in range(0, n_tiles, width):
            right = min(left + width, n_tiles)
            box = (slice(top, bottom), slice(left, right), slice(0, words))
            place = (top * n_tiles + left) * tile_bytes
            size = (bottom - top) * (right - left) * tile_bytes
            fill = partial(linear.codes.read_box, box)
            yield _load(f"{linear.name} tile rows {top}..{bottom}", fill, codes[place : place + size])


def _load(name: str, fill: partial[None], target: torch.Tensor) -> Load:
    return Load(name, (Read(0, target.numel(), fill),), (Move(0, target, 0, target.numel()),))


def _copy(part: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> None:
    np.copyto(out, part)
