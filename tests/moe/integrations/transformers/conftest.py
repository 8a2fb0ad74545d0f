"""Owns what tests of the transformers integration share: small models, each written once for all tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from data_set import data_set, pytest_generate_tests

__all__ = ["data_set", "pytest_generate_tests"]

pytest.importorskip("transformers", reason="transformers is an extra of trellis-moe")

from exl3_models import write_models

Models = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Gives, for a `model_type` and other arguments of `write_models`, the EXL3 directory and that of its weights."""

    @functools.cache
    def write(model_type: str, codebook: str = "mcg") -> tuple[Path, Path]:
        return write_models(tmp_path_factory.mktemp(model_type), model_type, codebook=codebook)

    return write
