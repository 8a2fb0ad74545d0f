"""Owns the kernels' view of a layer's codes: one word array and a descriptor per linear.

It must not know containers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trellis_format.rates import Rate
from trellis_kernels.errors import KernelValueError
from trellis_prep import PreparedExperts

__all__ = ["CodeBank", "code_banks"]


@dataclass(frozen=True, eq=False)
class CodeBank:
    """The codes of one projection of every expert.

    Attributes:
        codebook: its name.
        k: input channels, a multiple of 128.
        n: output channels, a multiple of 128.
        words: `[words] int32`, the layer's codes.
        descriptors: `[experts, 2] int64` on the same device: first word of each expert's linear, 2K.
        places: the same numbers on the host, `[experts]` of (first word, 2K).
    """

    codebook: str
    k: int
    n: int
    words: torch.Tensor
    descriptors: torch.Tensor
    places: tuple[tuple[int, int], ...]

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return len(self.places)

    def tiles(self, expert: int) -> tuple[torch.Tensor, Rate]:
        """One expert's codes as a view `[k_tiles, n_tiles, 16*K] int16`, and K.

        Raises:
            KernelValueError: if the words do not reach.
        """
        first, half_bits = self.places[expert]
        rate = Rate(half_bits)
        count = self.k // 16 * (self.n // 16) * rate.tile_words32
        if first + count > self.words.numel():
            raise KernelValueError(f"expert {expert}: words {first}..{first + count} of {self.words.numel()}")
        tiles = self.words[first : first + count].view(torch.int16)
        return tiles.view(self.k // 16, self.n // 16, rate.tile_words16), rate


def code_banks(experts: PreparedExperts) -> tuple[CodeBank, ...]:
    """The codes of a prepared layer, one bank for each projection in the order of the geometry."""
    layout = experts.layout
    return tuple(
        CodeBank(
            codebook=experts.source.codebook,
            k=layout.matrix(index)[0],
            n=layout.matrix(index)[1],
            words=experts.codes,
            descriptors=experts.descriptors[:, index].contiguous(),
            places=tuple(zip(layout.offsets[:, index].tolist(), layout.half_bits[:, index].tolist(), strict=True)),
        )
        for index in range(len(experts.source.geometry.projections))
    )
