"""Holds whole models in vLLM itself to logits that ExLlamaV3 gave; skips where vLLM is not installed."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]
CHECKPOINT = TESTS / "data/checkpoints/tiny_3_mul1"


def has_vllm() -> bool:
    """Whether vLLM is installed, without importing it."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def run_model(ranks: int, *options: str) -> dict[str, float]:
    """The error of the logits and the bytes that the first rank read."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), str(TESTS / "vllm_model.py")]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words, str(CHECKPOINT), *options],
        capture_output=True,
        text=True,
        timeout=1200,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, float] = json.loads(done.stdout.rpartition("RESULT ")[2].splitlines()[0])
    return result


@pytest.mark.skipif(not has_vllm(), reason="vLLM is an extra of trellis-moe")
@pytest.mark.parametrize(("ranks", "options"), [(1, []), (2, []), (2, ["--expert-parallel"])])
def test_logits_are_exllamav3s(ranks: int, options: list[str]) -> None:
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    result = run_model(ranks, *options)
    assert 0 < result["error"] <= 5e-3
    quantised = 2_085_604  # bytes of all quantised linears; some are whole on every rank
    assert result["bytes_read"] <= quantised * (1 if ranks == 1 else 0.7)
