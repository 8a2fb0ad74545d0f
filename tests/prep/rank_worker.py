"""Owns what one rank of the distributed tests does, in a process of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
import torch.distributed as dist

from prep.samples import open_layer, random_tokens, weights_of
from trellis_format.activations import Activation
from trellis_format.reference import moe_forward
from trellis_prep import TrellisStaging, prepare, rank_extent

ACTIVATION = Activation("silu")  # the files state none


def run_rank(rank: int, world: int, folder: Path, store: str) -> None:
    """Prepare this rank's share from the files in `folder`, and add up outputs with the other ranks.

    Saves to `folder`, as rank-<world>-<rank>.pt: the summed output, the bytes read, those of the share, its digest.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        checkpoint, source, weights = open_layer(folder)
        with checkpoint:
            extent = rank_extent(source.geometry.padded_intermediate_size, rank, world)
            before = checkpoint.bytes_read
            prepared = prepare(source, weights, extent=extent, staging=TrellisStaging(max_experts=1), poison=True)
            read = checkpoint.bytes_read - before
        total = torch.from_numpy(moe_forward(*weights_of(prepared), *random_tokens(source), activation=ACTIVATION))
        dist.all_reduce(total)
        digest = hashlib.sha256(prepared.codes.numpy().tobytes()).hexdigest()
        result = {"total": total, "read": read, "share": prepared.layout.code_bytes, "digest": digest}
        torch.save(result, folder / f"rank-{world}-{rank}.pt")
    finally:
        dist.destroy_process_group()
