"""Holds the start of the command to one line and code 130 for an interrupt, whenever it comes."""

from __future__ import annotations

import pkgutil
from types import ModuleType

import pytest

import trellis_kernels
from interrupts import interrupted_start
from trellis_kernels import cli, entry


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_interrupt_while_a_library_loads_is_one_line(library: str) -> None:
    done = interrupted_start("trellis_kernels.entry", ["selfcheck"], library)
    assert done == (130, "", "trellis-kernels: interrupted\n")


def test_the_command_is_that_of_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda arguments: len(arguments))
    assert entry.main(["a", "b"]) == 2


def test_no_name_is_hidden_by_a_module() -> None:
    """Importing a module sets its name in the package, where it would hide what is asked for by that name."""
    modules = {module.name for module in pkgutil.iter_modules(trellis_kernels.__path__)}
    assert modules.isdisjoint(trellis_kernels.__all__)
    for name in trellis_kernels.__all__:
        assert not isinstance(getattr(trellis_kernels, name), ModuleType)
    assert trellis_kernels.ops.decode is trellis_kernels.decode
    with pytest.raises(AttributeError, match="module 'trellis_kernels' has no attribute 'nothing'"):
        trellis_kernels.nothing  # noqa: B018  # asking is what is tested
