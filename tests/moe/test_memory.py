"""Holds the telling of exhausted memory to the errors that libraries raise for it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trellis_moe.memory import is_out_of_memory

TOO_MANY = 1 << 50  # bytes


def test_a_cpu_without_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MANY, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as refused:
        np.empty(TOO_MANY, dtype=np.uint8)
    assert is_out_of_memory(refused.value)


def test_a_gpu_without_memory_is_known() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))


@pytest.mark.gpu
def test_a_gpu_says_it_alike() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(TOO_MANY, dtype=torch.uint8, device="cuda")
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("cannot allocate memory"), OSError(12)])
def test_other_errors_are_not_that(error: Exception) -> None:
    assert not is_out_of_memory(error)
