"""Owns the test data and the threads of the tests across packages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from data_set import data_set, pytest_generate_tests

__all__ = ["data_set", "one_thread", "pytest_generate_tests"]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Compute in one thread: on a busy machine, threads that wait for one another take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
