"""Owns the test data of trellis-prep's tests."""

from __future__ import annotations

from data_set import data_set, pytest_generate_tests

__all__ = ["data_set", "pytest_generate_tests"]
