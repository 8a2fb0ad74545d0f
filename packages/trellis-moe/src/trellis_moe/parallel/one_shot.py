"""Owns the all-reduce by direct reads of peers' memory, for sums too small to be worth a ring.

It must not know layers.  Each rank puts its part into memory that its peers map; one kernel waits for all of them, adds
the parts in the order of ranks, and waits again before anyone may overwrite them.  Multicast is not used.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from trellis_moe.parallel.collectives import Ranks

__all__ = ["OneShot", "open_one_shot"]

_LOG = logging.getLogger("trellis_moe")
_DTYPES = (torch.float32, torch.bfloat16)
_ALIGNMENT = 16  # bytes that the kernel reads at once


class OneShot:
    """Memory that the ranks of a group map, and the all-reduce over it; made by `open_one_shot`.

    Attributes:
        nbytes: of the memory.
    """

    def __init__(self, memory: torch.Tensor, group_name: str) -> None:
        self.nbytes = memory.numel()
        self._memory, self._group_name = memory, group_name

    def takes(self, numel: int, dtype: torch.dtype) -> bool:
        """Whether a sum of that many values fits."""
        nbytes = numel * dtype.itemsize
        return dtype in _DTYPES and 0 < nbytes <= self.nbytes and nbytes % _ALIGNMENT == 0

    def part(self, tokens: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """Where this rank puts its part, `[tokens, hidden]`."""
        return self._memory[: tokens * hidden * dtype.itemsize].view(dtype).view(tokens, hidden)

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Add the ranks' parts up.

        Args:
            part: from `part`, written in the order of the current stream.
            out: of the same shape and dtype, contiguous; the same bits on every rank.
        """
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._group_name, out)


def open_one_shot(ranks: Ranks, nbytes: int, device: torch.device) -> OneShot | None:
    """Map memory of all ranks of a group; every rank has to call it.

    Args:
        ranks: the group.
        nbytes: most bytes of a sum.
        device: of this rank.

    Returns:
        None where a rank cannot: no CUDA device, another host, no direct access; sums then go through the group.
    """
    if nbytes <= 0 or device.type != "cuda":
        return None
    try:
        from torch.distributed import _symmetric_memory as symmetric

        memory = symmetric.empty(-(-nbytes // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device)
        symmetric.rendezvous(memory, ranks.group)
        found: OneShot | None = OneShot(memory, ranks.group.group_name)
    except (ImportError, AttributeError, RuntimeError) as error:
        _LOG.info("no direct reads between the ranks' memory: %s", str(error).strip().splitlines()[0])
        found = None
    able = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(able, op=dist.ReduceOp.MIN, group=ranks.group)
    return found if bool(able.item()) else None
