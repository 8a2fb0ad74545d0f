"""Owns where every byte of a rank's share lies on the device, computed from the source alone.  It must not move bytes.

Codes are one array of 32-bit words, projection-major, then expert-major: all gates, all ups, all downs.  Each linear
keeps its stored tile order, `[k_tiles, n_tiles, 8*K]` words, and begins on a 16-byte boundary because a tile has a
multiple of 16 bytes at every rate.  Offsets are 64-bit, since a bank may exceed 2 GiB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trellis_format.extent import SLOT, TrellisExtent
from trellis_format.rates import TILE
from trellis_format.signs import SignAxis
from trellis_format.source import CodeLayout, Projection, TrellisSource
from trellis_prep.errors import PrepTypeError, PrepValueError

__all__ = ["LAYOUT_VERSION", "WORD_BYTES", "PreparedLayout", "TensorSpec", "plan_layout"]

LAYOUT_VERSION = 1
"""Version of the device layout; bumped with any change of meaning."""
WORD_BYTES = 4
"""Bytes of a word of codes."""


@dataclass(frozen=True)
class TensorSpec:
    """One prepared tensor.

    Attributes:
        name: "codes", or that of a table.
        shape: axis lengths.
        dtype: "int32", "int64" or "float16".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class PreparedLayout:
    """Places and sizes of prepared codes and tables.

    Attributes:
        source: the layer.
        extent: the share of the intermediate axis.
        offsets: `[experts, projections] int64`, first 32-bit word of each linear.
        half_bits: `[experts, projections] int64`, 2K of each linear.
        code_words: 32-bit words of all codes.
        tables: descriptors, scales, the signs of an intermediate Hadamard, and biases.
    """

    source: TrellisSource
    extent: TrellisExtent
    offsets: npt.NDArray[np.int64]
    half_bits: npt.NDArray[np.int64]
    code_words: int
    tables: tuple[TensorSpec, ...]

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Codes and tables."""
        return (TensorSpec("codes", (self.code_words,), "int32"), *self.tables)

    @property
    def table_bytes(self) -> dict[str, int]:
        """Bytes of each table by name."""
        return {table.name: table.nbytes for table in self.tables}

    @property
    def code_bytes(self) -> int:
        """Bytes of all codes."""
        return self.code_words * WORD_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of codes and tables."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def matrix(self, projection: int) -> tuple[int, int]:
        """(k, n) of the rank's share of a linear, in channels; `projection` is an index."""
        return local_matrix(self.source, self.extent, projection)

    def rows(self, projection: int) -> int:
        """Rows of tiles of the rank's share of a linear; `projection` is an index."""
        return self.matrix(projection)[0] // TILE

    @property
    def row_bytes(self) -> npt.NDArray[np.int64]:
        """`[experts, projections] int64`: bytes of one row of tiles of each linear's share."""
        columns = [self.matrix(index)[1] // TILE for index in range(self.half_bits.shape[1])]
        return self.half_bits * np.array(columns, dtype=np.int64) * TILE

    def run_bytes(self) -> int:
        """Fewest bytes of codes that lie together, as a source in files has them."""
        if self.source.layout is CodeLayout.SLOT_MAJOR:
            hidden = self.source.geometry.padded_hidden_size // TILE
            return int(np.min(self.half_bits)) * TILE * hidden * (SLOT // TILE)
        if self.extent == self.source.extent:
            return int(np.min(self.row_bytes * [self.rows(index) for index in range(self.half_bits.shape[1])]))
        return int(np.min(self.row_bytes[:, :-1]))

    def linear_words(self, expert: int, projection: int) -> int:
        """32-bit words of the rank's share of one linear; both arguments are indices."""
        k, n = self.matrix(projection)
        return k * n // TILE**2 * int(self.half_bits[expert, projection]) * TILE // WORD_BYTES

    def linear_bytes(self, expert: int, projection: int) -> int:
        """Bytes of the rank's share of one linear; both arguments are indices."""
        return self.linear_words(expert, projection) * WORD_BYTES

    def expert_bytes(self) -> list[int]:
        """Bytes of the codes of each expert."""
        experts, projections = self.half_bits.shape
        return [sum(self.linear_bytes(expert, index) for index in range(projections)) for expert in range(experts)]


def plan_layout(source: TrellisSource, extent: TrellisExtent | None = None) -> PreparedLayout:
    """Place a rank's share.

    Args:
        source: the layer.
        extent: the share of the intermediate axis (default: all that the source covers).

    Raises:
        PrepTypeError: if an argument has the wrong type.
        PrepValueError: if the extent is of another axis or outside the source's.
        FormatValueError: if the extent cuts a Hadamard block.
    """
    check_source(source)
    share = source.extent if extent is None else extent
    check_inside(share, source.extent)
    experts, projections = source.geometry.num_experts, len(source.geometry.projections)
    table = np.array(source.rates.half_bits, dtype=np.int64)
    half_bits = np.ascontiguousarray(np.broadcast_to(table, (experts, projections)))
    sizes = [local_matrix(source, share, index) for index in range(projections)]
    tiles = np.array([k * n // TILE**2 for k, n in sizes], dtype=np.int64)
    words = half_bits * tiles * (TILE // WORD_BYTES)
    flat = np.ascontiguousarray(words.T).reshape(-1)
    starts = np.concatenate(([0], np.cumsum(flat)))
    offsets = np.ascontiguousarray(starts[:-1].reshape(projections, experts).T)
    for array in (offsets, half_bits):
        array.setflags(write=False)
    return PreparedLayout(source, share, offsets, half_bits, int(starts[-1]), tuple(_tables(source, share)))


def check_source(source: TrellisSource) -> None:
    """Accept a description of a layer.

    Raises:
        PrepTypeError: if `source` is not a `TrellisSource`.
    """
    if not isinstance(source, TrellisSource):
        raise PrepTypeError(f"source must be a TrellisSource, got {type(source).__name__}")


def local_matrix(source: TrellisSource, extent: TrellisExtent, projection: int) -> tuple[int, int]:
    """(k, n) of the share of a linear, in channels; `projection` is an index."""
    hidden = source.geometry.padded_hidden_size
    down = source.geometry.projections[projection] is Projection.DOWN
    return (extent.width, hidden) if down else (hidden, extent.width)


def check_inside(extent: TrellisExtent, whole: TrellisExtent) -> None:
    """Accept a share of what the weights cover, cut at Hadamard blocks.

    Raises:
        PrepTypeError: if it is not a `TrellisExtent`.
        PrepValueError: if it is of another axis or reaches outside.
        FormatValueError: if it cuts a Hadamard block.
    """
    if not isinstance(extent, TrellisExtent):
        raise PrepTypeError(f"extent must be a TrellisExtent, got {type(extent).__name__}")
    if extent.global_intermediate_size != whole.global_intermediate_size:
        raise PrepValueError(
            f"extent is of an axis of {extent.global_intermediate_size} channels, the weights of one of "
            f"{whole.global_intermediate_size}"
        )
    if extent.first_slot < whole.first_slot or extent.end_channel > whole.end_channel:
        raise PrepValueError(
            f"extent of channels {extent.first_channel}..{extent.end_channel} is outside the weights' "
            f"{whole.first_channel}..{whole.end_channel}"
        )
    extent.check_blocks()


def holds_down_bias(extent: TrellisExtent) -> bool:
    """Whether a share adds the down bias: the one that begins at channel 0, so that the sum has it once."""
    return extent.first_channel == 0 and extent.width > 0


def _tables(source: TrellisSource, extent: TrellisExtent) -> list[TensorSpec]:
    geometry = source.geometry
    experts, projections, hidden = geometry.num_experts, len(geometry.projections), geometry.padded_hidden_size
    inputs = 1 if source.joint_input_scales else projections - 1
    shapes: dict[str, tuple[int, ...]] = {
        "input_scales": (1 if source.shared_input_scales else experts, inputs, hidden),
        "intermediate_scales": (experts, projections, extent.width),
        "output_scales": (1 if source.shared_output_scales else experts, hidden),
    }
    if source.expert_transform is not None:
        shapes |= {f"signs.{axis.name.lower()}": (experts, axis.per_channel * extent.width) for axis in SignAxis}
    for projection in source.biased:
        if projection is not Projection.DOWN:
            shapes[f"bias.{projection}"] = (experts, extent.width)
        elif holds_down_bias(extent):
            shapes[f"bias.{projection}"] = (experts, hidden)
    descriptors = TensorSpec("descriptors", (experts, projections, 2), "int64")
    return [descriptors, *(TensorSpec(name, shape, "float16") for name, shape in shapes.items())]
