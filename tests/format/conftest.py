"""Owns the fixtures of the tests of trellis-format.  It must not import torch."""

from __future__ import annotations

from data_set import data_set, pytest_generate_tests

__all__ = ["data_set", "pytest_generate_tests"]
