"""Owns memory that the ranks of a group map, and exchanges through it by the devices' copy engines.

It must not know layers.  A rank writes straight into its peers' memory and then meets them at a barrier on the device;
no multiprocessor is taken from the kernels that run meanwhile, but for the barriers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from trellis_moe.errors import MoeDistributedError
from trellis_moe.parallel.collectives import Ranks

__all__ = ["MappedRanks", "map_memory"]

_ALIGNMENT = 16  # bytes


class MappedRanks:
    """The ranks of a group over memory that all of them map; exchanges as `Ranks` has them, into that memory alone.

    Attributes:
        size: ranks.
        rank: of this process.
        memory: `[bytes] uint8`, this rank's.

    Args:
        size: ranks.
        rank: of this process.
        memory: this rank's.
        handle: gives peers' memory (`get_buffer`) and lets ranks meet (`barrier`).
    """

    def __init__(self, size: int, rank: int, memory: torch.Tensor, handle: Any) -> None:
        self.size, self.rank, self.memory, self._handle = size, rank, memory, handle

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in the mapped memory, where peers can write it."""
        first = tensor.data_ptr() - self.memory.data_ptr()
        return first >= 0 and first + tensor.numel() * tensor.element_size() <= self.memory.numel()

    def exchange(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give each rank its part of a tensor's first axis; see `Ranks.exchange`.

        Args:
            out: `[n, ...]` in the mapped memory, at the same place on every rank.
            tensor: `[n, ...]` of the same dtype, contiguous.
        """
        self._handle.barrier(0)  # peers may still read what this will overwrite
        parts = tensor.tensor_split(self.size)
        for peer in self._others_first():
            self._part_at(peer, out).copy_(parts[peer])
        self._handle.barrier(0)

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Put the ranks' tensors one after the other; see `Ranks.all_gather`.  An exchange must have come before.

        Args:
            out: `[n * size, ...]` in the mapped memory, at the same place on every rank.
            tensor: `[n, ...]` of the same dtype, contiguous.
        """
        for peer in self._others_first():
            self._part_at(peer, out).copy_(tensor)
        self._handle.barrier(0)

    def _others_first(self) -> list[int]:
        """Every rank, each rank beginning with another one, itself last."""
        return [(self.rank + step) % self.size for step in range(1, self.size + 1)]

    def _part_at(self, peer: int, out: torch.Tensor) -> torch.Tensor:
        """Where a peer has this rank's part of a tensor."""
        own = out.tensor_split(self.size)[self.rank]
        if peer == self.rank:
            return own
        place = (own.data_ptr() - self.memory.data_ptr()) // own.element_size()
        buffer: torch.Tensor = self._handle.get_buffer(peer, list(own.shape), own.dtype, place)
        return buffer


def map_memory(ranks: Ranks, nbytes: int, device: torch.device) -> MappedRanks:
    """Map memory of all ranks of a group; every rank has to call it.

    Args:
        ranks: the group.
        nbytes: of each rank.
        device: of this rank.

    Raises:
        MoeDistributedError: if a rank cannot: no CUDA device, another host, no direct access; on every rank.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(memory, ranks.group)
        found, why = MappedRanks(ranks.size, ranks.rank, memory, handle), ""
    except (ImportError, AttributeError, RuntimeError) as error:
        found, why = None, str(error).strip().splitlines()[0]
    able = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=ranks.group)
    if found is None or not bool(able.item()):
        who, reason = f"rank {ranks.rank} of {ranks.size}", why or "another one failed"
        raise MoeDistributedError(
            f"{who}: the ranks cannot map each other's memory ({reason}); transport='group' does without"
        )
    return found
