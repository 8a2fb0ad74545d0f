"""Owns which container a directory is.  It must not read what a container holds."""

from __future__ import annotations

import os
from pathlib import Path

from trellis_format.container import manifest as container_manifest
from trellis_format.errors import FormatArgumentError, FormatNotFoundError, FormatValueError
from trellis_format.native import manifest as native_manifest

__all__ = ["CONTAINERS", "container_of"]

CONTAINERS = ("exl3", "exl3-v1", "native")
"""Every container by name."""
_MANIFESTS = {"exl3-v1": container_manifest.MANIFEST_NAME, "native": native_manifest.MANIFEST_NAME}


def container_of(path: str | os.PathLike[str]) -> str:
    """The name of the container that a directory is, by its manifest; EXL3 has none.

    Raises:
        FormatNotFoundError: if there is no such directory.
        FormatValueError: if it is no directory, or has the manifests of two containers.
    """
    directory = Path(path)
    if not directory.exists():
        raise FormatNotFoundError("no such checkpoint directory", file=directory)
    if not directory.is_dir():
        raise FormatArgumentError("a checkpoint is a directory, this is a file", file=directory)
    found = [name for name, manifest in _MANIFESTS.items() if (directory / manifest).exists()]
    if len(found) > 1:
        raise FormatValueError(f"has the manifests of two containers: {', '.join(_MANIFESTS.values())}", file=directory)
    return found[0] if found else "exl3"
