"""Holds the start of the command to one line and code 130 for an interrupt, whenever it comes."""

from __future__ import annotations

import pkgutil
from types import ModuleType

import pytest

import trellis_prep
from interrupts import interrupted_start
from trellis_prep import cli, entry


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_interrupt_while_a_library_loads_is_one_line(library: str) -> None:
    done = interrupted_start("trellis_prep.entry", ["prepare", "--checkpoint", "."], library)
    assert done == (130, "", "trellis-prep: interrupted\n")


def test_the_command_is_that_of_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "main", lambda arguments: len(arguments))
    assert entry.main(["a", "b"]) == 2


def test_no_name_is_hidden_by_a_module() -> None:
    """Importing a module sets its name in the package, where it would hide what is asked for by that name."""
    modules = {module.name for module in pkgutil.iter_modules(trellis_prep.__path__)}
    assert modules.isdisjoint(trellis_prep.__all__)
    for name in trellis_prep.__all__:
        assert not isinstance(getattr(trellis_prep, name), ModuleType)
    assert trellis_prep.layout.plan_layout is trellis_prep.plan_layout
    with pytest.raises(AttributeError, match="module 'trellis_prep' has no attribute 'nothing'"):
        trellis_prep.nothing  # noqa: B018  # asking is what is tested
