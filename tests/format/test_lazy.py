"""Holds names that load late to being the same as those of their modules, and to loading no more than that takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import trellis_format
from trellis_format import detect, layer_source, lazy, source

_INIT = """
from trellis_format.lazy import lazy_names
__all__ = ["first", "second", "lazy_names", "gone"]
__getattr__, __dir__ = lazy_names(__name__, __all__, ("one", "two", "trellis_format.lazy"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of three modules: one that has `first`, one that hides it and has `second`, one that is broken."""
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "__init__.py").write_text(_INIT)
    (folder / "one.py").write_text("__all__ = ['first']\nfirst = 1\nsecond = 'private here'\n")
    (folder / "two.py").write_text("__all__ = ['first', 'second']\nfirst, second = -1, 2\n")
    (folder / "broken.py").write_text("import absent_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("late", "late.one", "late.two", "late.broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__("late")


def test_a_name_loads_its_module_and_none_after_it(package: ModuleType) -> None:
    assert not {"late.one", "late.two"} & set(sys.modules)
    assert (package.first, "late.one" in sys.modules, "late.two" in sys.modules) == (1, True, False)
    assert package.second == 2
    assert package.lazy_names is lazy.lazy_names
    assert vars(package)["second"] == 2  # found without a call from then on


def test_modules_are_attributes(package: ModuleType) -> None:
    assert package.two.first == -1
    with pytest.raises(ModuleNotFoundError, match="absent_library"):
        package.broken  # noqa: B018  # asking is what is tested


@pytest.mark.parametrize("name", ["nothing", "gone", "__wrapped__", "__main__"])
def test_what_is_not_there_is_an_attribute_error(package: ModuleType, name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'late' has no attribute '{name}'"):
        getattr(package, name)


def test_all_names_are_listed_before_they_are_loaded(package: ModuleType) -> None:
    assert {"first", "second", "lazy_names", "__all__", "__file__"} <= set(dir(package))
    assert dir(package) == sorted(dir(package))
    assert "first" not in vars(package)


def test_the_package_has_its_names() -> None:
    assert trellis_format.container_of is detect.container_of
    assert trellis_format.open_layer_source is layer_source.open_layer_source
    assert trellis_format.TrellisSource is source.TrellisSource
    assert all(getattr(trellis_format, name).__name__ == name for name in trellis_format.__all__)


@pytest.mark.parametrize("module", ["trellis_format", "trellis_format.entry"])
def test_the_package_loads_no_library_before_it_is_used(module: str) -> None:
    program = f"import sys, {module}; print({{'numpy', 'pydantic', 'safetensors', 'torch'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")
