"""Owns the read of rows of a linear's share into a host buffer, and what a failed read is called.

It must not know devices, threads, nor how codes lie.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.errors import FormatError
from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import FileRuns, ShardReader
from trellis_format.linear_reader import LinearReader
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.errors import PrepMemoryError, PrepReadError

__all__ = ["ShareReader"]


class ShareReader:
    """Reads the codes of a rank's share; several threads may use it at a time.

    Args:
        source: the layer.
        weights: its arrays.
        extent: the share, inside the source's extent.
    """

    def __init__(self, source: TrellisSource, weights: TrellisWeights, extent: TrellisExtent) -> None:
        self._projections = source.geometry.projections
        self._linears = LinearReader(source, weights, extent)

    def read(
        self, expert: int, projection: int, out: npt.NDArray[np.uint8], first: int = 0, end: int | None = None
    ) -> None:
        """Read rows of tiles [first, end) of one linear's share, in the final tile order.

        Args:
            expert: index.
            projection: index into the geometry's projections.
            out: `[bytes] uint8`, exactly the rows' bytes.
            first: first row, counted from the share's first.
            end: row past the last (default: the share's end).

        Raises:
            PrepReadError: if the file is short, changed or unreadable; names file, tensor, expert and projection.
            PrepMemoryError: if memory runs out while reading; names them too.
        """
        try:
            self._linears.read(expert, projection, out, first, end)
        except FormatError as error:
            where = self._where(expert, projection)
            raise PrepReadError(f"{where}: {error.message}", file=error.file, tensor=error.tensor) from error
        except OSError as error:
            where = self._where(expert, projection)
            raise PrepReadError(f"{where}: cannot be read: {error.strerror or error}") from error
        except MemoryError as error:
            where = self._where(expert, projection)
            raise PrepMemoryError(f"{where}: memory ran out while {out.size} bytes were read") from error

    def runs(self, expert: int, projection: int, first: int = 0, end: int | None = None) -> FileRuns | None:
        """Where rows of tiles [first, end) lie in a file, and where they go in the order of `read`.

        None where they are in memory, or only `read` knows.
        """
        return self._linears.runs(expert, projection, first, end)

    def starts(self) -> tuple[list[ShardReader], npt.NDArray[np.int64]] | None:
        """Where each linear begins: `[experts * projections]` files and `int64` bytes; None unless all lie in files."""
        return self._linears.starts()

    def _where(self, expert: int, projection: int) -> str:
        return f"expert {expert} {self._projections[projection]}"
