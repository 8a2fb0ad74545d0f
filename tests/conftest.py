"""Owns what all tests share: hypothesis profile, test data option, Ctrl-C, and the rule for tests that need a GPU.

It must not import torch itself, since the tests of trellis-format run where torch is absent.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from data_set import DEFAULT_DATA

# No deadline: the first example of a test may compile or page in a file.  Derandomised, so that a run can be repeated.
settings.register_profile("trellis", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("trellis")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--data`, the folder with the checkpoints and outputs that tests read."""
    parser.addoption("--data", type=Path, default=DEFAULT_DATA, metavar="DIR", help="test data; default: tests/data")


def pytest_configure() -> None:
    """Let Ctrl-C interrupt where a shell told its background jobs to ignore it: tests send it, to children too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def has_cuda() -> bool:
    """Whether torch is installed and finds a CUDA device."""
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` where there is none; torch is looked for only when such a test was collected."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
