"""Owns a folder of prepared shares, so that the next start reads one run of bytes where this one gathered many.

It must not decide what a share is: its key does.  An entry is found by the digest of source, layout version and extent,
is trusted only after its SHA-256 was checked while it was read, and is replaced when it is damaged or not what its name
says.  Processes may share the folder: entries appear whole, and two that make the same one write the same bytes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from trellis_format.errors import FormatError, FormatNotFoundError
from trellis_format.extent import TrellisExtent
from trellis_format.files.header import FileIdentity
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_prep.cache_file import CacheFile, write_cache_file
from trellis_prep.checks import check_weights
from trellis_prep.devices import resolve_device
from trellis_prep.digest import share_key
from trellis_prep.plan import PreparationPlan, plan_preparation
from trellis_prep.preparation import Progress, fill_tensors, prepare
from trellis_prep.prepared import PreparedExperts
from trellis_prep.stage import StagingBuffer
from trellis_prep.staging import TrellisStaging

__all__ = ["CacheWarning", "PreparedCache"]

_TRIES = 4
"""Reads of an entry that other processes replace meanwhile, before it is given up."""


class CacheWarning(UserWarning):
    """An entry was damaged, or could not be written; the prepared share is right all the same."""


class PreparedCache:
    """Prepared shares in a folder.  Whoever can write there can choose weights, as with the checkpoint itself.

    Args:
        directory: the folder, made when the first entry is written.

    Attributes:
        hits: shares that were read from an entry.
        misses: shares that had none.
        damaged: shares whose entry was refused.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.hits = self.misses = self.damaged = 0

    def path_of(self, source: TrellisSource, weights: TrellisWeights, extent: TrellisExtent | None = None) -> Path:
        """Where the entry of a share is, or would be.

        Raises:
            PrepReadError: if a file of the weights is gone.
        """
        return self.directory / f"{share_key(source, weights, extent or source.extent)}.safetensors"

    def prepare(
        self,
        source: TrellisSource,
        weights: TrellisWeights,
        *,
        device: torch.device | str | None = None,
        staging: TrellisStaging | None = None,
        extent: TrellisExtent | None = None,
        progress: Progress | None = None,
        poison: bool = False,
        buffer: StagingBuffer | None = None,
    ) -> PreparedExperts:
        """As `trellis_prep.prepare`, from an entry where there is a good one; otherwise one is written.

        An entry that cannot be written costs a `CacheWarning`, not the share.  Progress starts over where an entry is
        refused.

        Raises:
            PrepError, FormatError: as `trellis_prep.prepare`.
        """
        plan = plan_preparation(source, extent=extent, staging=staging)
        check_weights(source, weights)
        target = resolve_device(device)
        path = self.path_of(source, weights, plan.layout.extent)
        cached = self._find(path, lambda: _load(path, plan, target, progress, poison, buffer))
        if isinstance(cached, PreparedExperts):
            return cached
        prepared = prepare(
            source,
            weights,
            device=target,
            staging=plan.staging,
            extent=plan.layout.extent,
            progress=progress,
            poison=poison,
            buffer=buffer,
        )
        if self.path_of(source, weights, plan.layout.extent) == path:  # nobody changed a file meanwhile
            self._store(path, prepared, plan.slot_bytes, replace=cached is not None)
        return prepared

    def _find(
        self, path: Path, load: Callable[[], PreparedExperts | FormatError | None]
    ) -> PreparedExperts | FormatError | None:
        """The share of an entry, why the entry was refused, or None where there is none."""
        found: PreparedExperts | FormatError | None = None
        for _ in range(_TRIES):
            seen = _identity(path)
            found = load()
            if not isinstance(found, FormatError) or _identity(path) == seen:
                break  # otherwise another process put a whole entry there while this one was read
        if found is None:
            self.misses += 1
        elif isinstance(found, FormatError):
            self.damaged += 1
            warnings.warn(f"cached share is made again: {found}", CacheWarning, stacklevel=3)
        else:
            self.hits += 1
        return found

    def _store(self, path: Path, prepared: PreparedExperts, piece_bytes: int, *, replace: bool) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if replace or not path.exists():  # another process may have been faster
                write_cache_file(path, path.stem, prepared, piece_bytes)
        except OSError as error:
            warnings.warn(f"share is not cached: {path}: {error.strerror or error}", CacheWarning, stacklevel=3)


def _load(
    path: Path,
    plan: PreparationPlan,
    device: torch.device,
    progress: Progress | None,
    poison: bool,
    buffer: StagingBuffer | None,
) -> PreparedExperts | FormatError | None:
    try:
        entry = CacheFile(path, plan.layout, path.stem)
        prepared = fill_tensors(
            plan,
            device,
            lambda tensors: entry.loads(tensors, plan.slot_bytes),
            progress=progress,
            poison=poison,
            buffer=buffer,
        )
        entry.check_digest()
    except FormatNotFoundError:
        return None
    except FormatError as error:
        return error.with_traceback(None)  # its frames hold the tensors that are refused
    return prepared


def _identity(path: Path) -> FileIdentity | None:
    try:
        return FileIdentity.of(path.stat())
    except OSError:
        return None
