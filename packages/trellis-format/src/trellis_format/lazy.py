"""Owns how a package finds a name when it is first asked for.  It must not know which names.

numpy and torch take from a tenth of a second to seconds to load; a package that imports nothing of its own is there at
once, and a command can answer an interrupt while the rest loads.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

__all__ = ["lazy_names"]


def lazy_names(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Functions for a package's `__getattr__` and `__dir__`, which load a name's module when the name is asked for.

    A module of the package is found as an attribute too, without an import of its own.

    Args:
        package: name of the package, whose `__init__` has run as far as this call.
        names: what it exports, its `__all__`.
        modules: where to look, in this order: modules of the package, or of another where the name has a dot.  Each
            lists what it has in its own `__all__`.

    Returns:
        The two functions.  `__getattr__` raises AttributeError for what is neither a name nor a module.
    """

    def find(name: str) -> object:
        space = vars(sys.modules[package])
        if name in names:
            for module in modules:
                found = vars(importlib.import_module(module if "." in module else f"{package}.{module}"))
                if name in found["__all__"]:
                    return space.setdefault(name, found[name])
        full = f"{package}.{name}"
        if not name.startswith("__"):
            try:
                return importlib.import_module(full)
            except ModuleNotFoundError as error:
                if error.name != full:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *names})

    return find, listed
