"""Owns the small layer that the tests of the check run.  It must not assert."""

from __future__ import annotations

import torch

from trellis_format.activations import Activation
from trellis_kernels.bench.layers import random_source
from trellis_moe.dist_check.build import Request
from trellis_moe.dist_check.samples import noise_weights

__all__ = ["request_of"]


def request_of(*, experts: int = 3, intermediate: int = 256, token_counts: tuple[int, ...] = (1, 4)) -> Request:
    """Top 2 of some experts on the CPU, float16 in and out."""
    source = random_source(
        experts=experts, hidden=128, intermediate=intermediate, codebook="mul1", rates=["3"],
        activation=Activation("silu"),
    )  # fmt: skip
    return Request(source, noise_weights(source), token_counts, 2, "float16", "float16", torch.device("cpu"))
