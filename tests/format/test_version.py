"""Holds the version to what the project states, installed or not."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

from trellis_format import version as module
from trellis_format.version import version

PYPROJECT = Path(__file__).resolve().parents[2] / "packages/trellis-format/pyproject.toml"


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_the_version_is_that_of_the_project() -> None:
    assert version() == tomllib.loads(PYPROJECT.read_text())["project"]["version"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[project]\nname = "trellis-format"\nversion = "1.2.3"\n', "1.2.3"),
        ('[project]\nname = "something-else"\nversion = "1.2.3"\n', "unknown"),
        ('[project]\nname = "trellis-format"\n', "unknown"),
        ("not toml", "unknown"),
        (None, "unknown"),
    ],
)
def test_sources_that_are_not_installed_read_their_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, expected: str
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", missing)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "src" / "trellis_format" / "version.py"))
    if text is not None:
        (tmp_path / "pyproject.toml").write_text(text)
    assert version() == expected
