"""Owns the read of one linear's share into a host buffer.  It must not know devices, nor how codes lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError
from trellis_format.extent import TrellisExtent
from trellis_format.slots import read_linear_into
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.errors import PrepMemoryError, PrepReadError
from trellis_prep.layout import check_source

__all__ = ["read_linear"]


def read_linear(
    source: TrellisSource,
    weights: TrellisWeights,
    expert: int,
    projection: int,
    extent: TrellisExtent,
    out: npt.NDArray[np.uint8],
) -> None:
    """Read the share of one linear, in the final tile order.

    Args:
        source: the layer.
        weights: its arrays.
        expert: index.
        projection: index into the geometry's projections.
        extent: the share, inside the source's extent.
        out: `[bytes] uint8`, exactly the share's bytes.

    Raises:
        PrepUnsupportedError: if the layer cannot be prepared.
        PrepReadError: if the file is short, changed or unreadable; names file, tensor, expert and projection.
        PrepMemoryError: if memory runs out while reading; names them too.
    """
    check_source(source)
    where = f"expert {expert} {source.geometry.projections[projection]}"
    try:
        read_linear_into(source, weights, expert, projection, extent, out)
    except FormatError as error:
        raise PrepReadError(f"{where}: {error.message}", file=error.file, tensor=error.tensor) from error
    except OSError as error:
        raise PrepReadError(f"{where}: cannot be read: {error.strerror or error}") from error
    except MemoryError as error:
        raise PrepMemoryError(f"{where}: memory ran out while {out.size} bytes were read") from error
