"""Owns a pytest plugin under which all memory that torch hands out uninitialised holds NaN bits, on every device.

    PYTEST_PLUGINS=poison python -m pytest tests/moe/test_binding.py

It must not know what is tested: whatever reads memory that nobody wrote gives NaN, or an index out of all bounds.
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["is_poisoned"]


def is_poisoned() -> bool:
    """Whether memory comes poisoned now."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def pytest_configure(config: pytest.Config) -> None:
    """Switch the poison on; torch ties it to its deterministic algorithms, which only warn here."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # torch has no type for it
    config.addinivalue_line("filterwarnings", "ignore:.*deterministic")  # that algorithms have no such form, says torch
    config.add_cleanup(lambda: torch.use_deterministic_algorithms(False))


def pytest_report_header() -> str:
    """Say so at the start."""
    return f"poison: {torch.empty(1).item()}"
