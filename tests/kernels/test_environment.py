"""Holds the package's environment variables to what they mean, and to the one module that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

import trellis_kernels
from trellis_kernels.environment import CACHE_VARIABLE, cache_folder


@pytest.fixture(autouse=True)
def _read_again():
    cache_folder.cache_clear()
    yield
    cache_folder.cache_clear()


@pytest.mark.parametrize("value", ["off", "OFF"])
def test_the_cache_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, value)
    assert cache_folder() is None


def test_the_cache_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    assert cache_folder() == tmp_path


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "trellis-kernels"
    cache_folder.cache_clear()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "trellis-kernels"


def test_variables_are_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    first = cache_folder()
    monkeypatch.setenv(CACHE_VARIABLE, "off")
    assert cache_folder() == first


def test_no_other_module_reads_the_environment() -> None:
    root = Path(trellis_kernels.__file__).parent
    readers = {path.name for path in root.rglob("*.py") if "os.environ" in path.read_text()}
    assert readers == {"environment.py"}
