"""Owns measurements of other projects that were taken elsewhere than in a receipt.  It must not judge by them.

They have no raw samples, so they are shown beside receipts with their source, and never as a receipt's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.packing import unpack

__all__ = ["PEER_FOLDER", "Peer", "PeerRow", "load_peers"]

PEER_FOLDER = "peer"
"""Folder of these files in `docs/benchmarks`."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PeerRow(_Part):
    """One time.

    Attributes:
        geometry: name of the preset.
        codebook: of the codes; None where weights are not quantised.
        k: rate; likewise.
        tokens: of one launch.
        ms: milliseconds.
    """

    geometry: str
    codebook: str | None
    k: str | None
    tokens: Annotated[int, Field(gt=0)]
    ms: Annotated[float, Field(gt=0)]


class Peer(_Part):
    """What another project took.

    Attributes:
        schema_name: `trellis-moe/peer`; `schema` in JSON.
        schema_version: of this shape.
        contender: the project and its version.
        source: how it was got.
        method: what was timed, and how.
        gpu: where.
        torch: version of torch.
        date: of the measurement.
        rows: times.
    """

    schema_name: Literal["trellis-moe/peer"] = Field(alias="schema")
    schema_version: Literal[1]
    contender: str
    source: str
    method: str
    gpu: str
    torch: str
    date: str
    rows: tuple[PeerRow, ...]

    def time(self, geometry: str, codebook: str, k: str, tokens: int) -> float | None:
        """Milliseconds for a layer, None if there is none; unquantised weights serve every codebook and rate."""
        for row in self.rows:
            if (
                (row.geometry, row.tokens) == (geometry, tokens)
                and row.codebook in (None, codebook)
                and row.k in (None, k)
            ):
                return row.ms
        return None


def load_peers(benchmarks: Path) -> tuple[Peer, ...]:
    """Every file of other projects' measurements, by name; their rows are packed as those of receipts are.

    Args:
        benchmarks: the folder `docs/benchmarks`.

    Raises:
        MoeValueError: if a file is not of the schema.
    """
    found = []
    for path in sorted((benchmarks / PEER_FOLDER).glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
            content["rows"] = unpack(content["rows"])
            found.append(Peer.model_validate_json(json.dumps(content)))
        except (KeyError, TypeError) as error:
            raise MoeValueError(f"{path}: rows are no tables: {error}") from error
        except ValidationError as error:
            raise MoeValueError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    return tuple(found)
