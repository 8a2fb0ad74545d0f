"""Owns the sum of ranks' partial sums in the order of ranks, so that no bit depends on a token's place in the batch.

It must not know launches.  Tokens are shared out: every rank gets all ranks' parts of its own tokens, adds them one
rank after the other in float32, rounds once, and the results are gathered.  That moves what a ring moves; a ring starts
each piece of a message at another rank, which is another order of the same sum from three ranks on.
"""

from __future__ import annotations

import torch

from trellis_moe.parallel.collectives import Ranks
from trellis_moe.parallel.mapped import MappedRanks

__all__ = ["RankOrder"]


class RankOrder:
    """The ordered sum over a group.

    Args:
        ranks: whose parts are added.
        buffers: `parts`, `own_sums32`, `own_results` and `results` of a plan, each for as many tokens as it may have;
            of mapped ranks, `parts` and `results` in their memory.
        output_dtype: of results.
    """

    def __init__(self, ranks: Ranks | MappedRanks, buffers: dict[str, torch.Tensor], output_dtype: torch.dtype) -> None:
        self._ranks, self._buffers, self._dtype = ranks, buffers, output_dtype

    def add(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """Every token's sum, on every rank.

        Args:
            partial: `[tokens rounded up to a multiple of ranks, hidden]`; what it holds beyond `out`'s tokens is
                added up too and goes nowhere.
            out: `[tokens, hidden]` in the output dtype, contiguous; written whole.
        """
        sums = self._own(partial)
        own = self._buffers["own_results"][: sums.shape[0]]
        own.copy_(sums)
        if out.shape[0] == partial.shape[0] and isinstance(self._ranks, Ranks):
            self._ranks.all_gather(out, own)
            return
        results = self._buffers["results"][: partial.shape[0]]
        self._ranks.all_gather(results, own)
        out.copy_(results[: out.shape[0]])

    def scatter(self, partial: torch.Tensor, out: torch.Tensor) -> None:
        """The sums of this rank's part of the tokens.

        Args:
            partial: `[tokens, hidden]`.
            out: `[tokens / ranks, hidden]` in the output dtype; written whole.
        """
        out.copy_(self._own(partial))

    def _own(self, partial: torch.Tensor) -> torch.Tensor:
        size, hidden = self._ranks.size, partial.shape[1]
        parts = self._buffers["parts"][: partial.shape[0]]
        self._ranks.exchange(parts, partial)
        by_rank = parts.view(size, -1, hidden)
        sums = self._buffers["own_sums32"][: by_rank.shape[1]]
        sums.copy_(by_rank[0])
        for rank in range(1, size):
            sums.add_(by_rank[rank])
        return sums
