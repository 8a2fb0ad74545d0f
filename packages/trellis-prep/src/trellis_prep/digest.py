"""Owns the digest of what a layer's weights are, by which prepared shares are found again.  It must not prepare.

Scales, biases and codes in memory are digested by content.  Codes that are whole tensors of a file are digested by
where they lie in it and by the file's identity (device, inode, size, times of change): reading them all would cost
what finding them again saves.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trellis_format.extent import TrellisExtent
from trellis_format.files.arrays import ArrayView, FileArray
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.errors import PrepReadError
from trellis_prep.layout import LAYOUT_VERSION

__all__ = ["share_key", "source_digest"]

_BAND_BYTES = 16 << 20


def share_key(source: TrellisSource, weights: TrellisWeights, extent: TrellisExtent) -> str:
    """The name of a prepared share: 64 hexadecimal digits, of source, layout version and extent.

    Raises:
        PrepReadError: if a file of the weights is gone.
    """
    parts = {"source": source_digest(source, weights), "layout": LAYOUT_VERSION, "extent": asdict(extent)}
    return hashlib.sha256(_canonical(parts)).hexdigest()


def source_digest(source: TrellisSource, weights: TrellisWeights) -> str:
    """SHA-256 of all that decides a layer's prepared bytes, in hexadecimal.

    Raises:
        PrepReadError: if a file of the weights is gone.
    """
    described = {
        "codebook": source.codebook,
        "geometry": asdict(source.geometry),
        "rates": source.rates.half_bits,
        "layout": source.layout,
        "extent": asdict(source.extent),
        "shared": [source.shared_input_scales, source.joint_input_scales, source.shared_output_scales],
        "biased": source.biased,
        "transform": None if source.expert_transform is None else asdict(source.expert_transform),
    }
    digest = hashlib.sha256(_canonical(described))
    arrays: dict[str, npt.NDArray[Any]] = weights.scale_arrays()
    if weights.expert_sign_patterns is not None:
        arrays["sign_patterns"] = weights.expert_sign_patterns
    for name, array in arrays.items():
        digest.update(_canonical([name, array.shape, array.dtype.str]))
        digest.update(np.ascontiguousarray(array).data)
    identity = cache(_file_identity)
    for place, view in _code_views(weights):
        digest.update(_canonical([place, view.shape, view.dtype.str]))
        if isinstance(view, FileArray):
            digest.update(_canonical([identity(view.file), view.entry.name, view.entry.begin, view.entry.end]))
        else:
            _update(digest, view)
    return digest.hexdigest()


def _code_views(weights: TrellisWeights) -> Iterator[tuple[list[int], ArrayView]]:
    if isinstance(weights.codes, ArrayView):
        yield [], weights.codes
        return
    for expert, row in enumerate(weights.codes):
        for projection, view in enumerate(row):
            yield [expert, projection], view


def _update(digest: hashlib._Hash, view: ArrayView) -> None:
    """Add a view's content, in bands of its first axis so that little of a file is held at a time."""
    rest = tuple(slice(0, size) for size in view.shape[1:])
    row_bytes = math.prod(view.shape[1:]) * view.dtype.itemsize
    band = max(_BAND_BYTES // max(row_bytes, 1), 1)
    for first in range(0, view.shape[0], band):
        rows = slice(first, min(first + band, view.shape[0]))
        out = np.empty((rows.stop - rows.start) * row_bytes, dtype=np.uint8)
        view.read_box((rows, *rest), out)
        digest.update(out.data)


def _file_identity(path: str) -> list[int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise PrepReadError(f"cannot be identified: {error.strerror or error}", file=path) from error
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
