"""Holds the package to its names, each found when it is asked for, and to loading no more than that takes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import trellis_moe
from trellis_moe import binding, errors, lifecycle, linear, module, plan, scratch, session, specs, variants


def test_each_name_is_that_of_its_module() -> None:
    modules = (errors, specs, scratch, variants, plan, session, lifecycle, binding, module, linear)
    for name in trellis_moe.__all__:
        (home,) = [one for one in modules if name in one.__all__]
        assert getattr(trellis_moe, name) is getattr(home, name)
    assert set(trellis_moe.__all__) <= set(dir(trellis_moe))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'trellis_moe' has no attribute 'gone'"):
        _ = trellis_moe.gone
    assert not hasattr(trellis_moe, "total_bytes")  # of a module, and not of the package


def test_the_command_loads_torch_with_its_work_and_not_before() -> None:
    program = "import sys, trellis_moe.cli; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")
