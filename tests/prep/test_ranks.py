"""Holds ranks in processes of their own to reading their bytes alone and adding up to the unsplit layer."""

from __future__ import annotations

import hashlib
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from prep.rank_worker import run_rank
from prep.samples import Layer, random_layer, random_tokens, write_checkpoint
from trellis_format.reference import moe_forward
from trellis_prep import even_extents, prepare

BLOCKS = 9


@pytest.fixture(scope="module")
def layer() -> Layer:
    """Two experts of mixed rates with biases, wide enough for nine ranks."""
    return random_layer(experts=2, hidden=128, intermediate=BLOCKS * 128, biased=True)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo")
@pytest.mark.parametrize("world", [1, 2, 3, 5, 9])
def test_ranks_read_their_own_and_sum_to_the_whole(tmp_path: Path, layer: Layer, world: int) -> None:
    write_checkpoint(tmp_path, layer)
    context = multiprocessing.get_context("forkserver")  # torch is loaded once, and ranks start from a clean process
    context.set_forkserver_preload(["torch", "torch.distributed", "trellis_prep", "safetensors.numpy", "pytest"])
    store = str(tmp_path / "store")
    ranks = [context.Process(target=run_rank, args=(rank, world, tmp_path, store)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [0] * world
    expected = moe_forward(*layer, *random_tokens(layer[0]))
    for rank, extent in enumerate(even_extents(BLOCKS * 128, world)):
        found = torch.load(tmp_path / f"rank-{world}-{rank}.pt")
        assert found["read"] == found["share"] == layer[0].code_bytes(extent)
        own = prepare(*layer, extent=extent).codes.numpy()
        assert found["digest"] == hashlib.sha256(own.tobytes()).hexdigest()
        difference = np.linalg.norm(found["total"].numpy() - expected)
        assert difference <= 1e-12 * np.linalg.norm(expected)
