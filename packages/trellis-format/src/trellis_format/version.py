"""Owns the answer to which version this is.  It must not hold the number itself: pyproject.toml does."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

__all__ = ["version"]


def version() -> str:
    """The version, also where the sources run without being installed; "unknown" where nothing tells."""
    try:
        return importlib.metadata.version("trellis-format")
    except importlib.metadata.PackageNotFoundError:
        pass
    path = Path(__file__).resolve().parents[2] / "pyproject.toml"
    try:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return str(project["version"]) if project["name"] == "trellis-format" else "unknown"
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        return "unknown"
