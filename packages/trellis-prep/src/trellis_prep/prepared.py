"""Owns prepared experts: device tensors in final layout and the tables that kernels read.  It must not move bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from trellis_format.extent import TrellisExtent
from trellis_format.rates import TILE, Rate
from trellis_format.source import Projection, TrellisSource
from trellis_prep.layout import PreparedLayout

__all__ = ["PreparedExperts"]

_BIAS = "bias."
_SIGNS = "signs."


@dataclass(frozen=True, eq=False)
class PreparedExperts:
    """One rank's share of a layer on its device.  Owns its storage.

    Attributes:
        layout: where the codes lie.
        codes: `[words] int32`, every linear at its offset.
        descriptors: `[experts, projections, 2] int64`: offset in 32-bit words, 2K.
        input_scales: `[experts or 1, fc1 or 1, hidden] float16`.
        intermediate_scales: `[experts, projections, width] float16`: gate svh, up svh, down suh.
        output_scales: `[experts or 1, hidden] float16`.
        biases: `{projection: [experts, n] float16}`; the down bias only on the share that begins at channel 0.
        signs: under an intermediate Hadamard, `{"pre": [experts, 2 * width], "post": [experts, width]}`, float16 of +1
            and -1; else empty.
    """

    layout: PreparedLayout
    codes: torch.Tensor
    descriptors: torch.Tensor
    input_scales: torch.Tensor
    intermediate_scales: torch.Tensor
    output_scales: torch.Tensor
    biases: dict[Projection, torch.Tensor]
    signs: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, layout: PreparedLayout, tensors: Mapping[str, torch.Tensor]) -> PreparedExperts:
        """Put tensors together by the names of `layout.tensors`."""
        return cls(
            layout=layout,
            codes=tensors["codes"],
            descriptors=tensors["descriptors"],
            input_scales=tensors["input_scales"],
            intermediate_scales=tensors["intermediate_scales"],
            output_scales=tensors["output_scales"],
            biases={
                Projection(name.removeprefix(_BIAS)): tensor
                for name, tensor in tensors.items()
                if name.startswith(_BIAS)
            },
            signs={name.removeprefix(_SIGNS): tensor for name, tensor in tensors.items() if name.startswith(_SIGNS)},
        )

    @property
    def source(self) -> TrellisSource:
        """The layer."""
        return self.layout.source

    @property
    def extent(self) -> TrellisExtent:
        """The share of the intermediate axis."""
        return self.layout.extent

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.codes.device

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Codes and tables by the names of `layout.tensors`."""
        named = {
            name: getattr(self, name)
            for name in ("codes", "descriptors", "input_scales", "intermediate_scales", "output_scales")
        }
        named |= {f"{_SIGNS}{axis}": tensor for axis, tensor in self.signs.items()}
        return named | {f"{_BIAS}{projection}": tensor for projection, tensor in self.biases.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def tiles(self, expert: int, projection: int) -> tuple[torch.Tensor, Rate]:
        """One linear's codes and rate.

        Returns:
            A view `[k_tiles, n_tiles, 16*K] int16`, and K; both arguments are indices.
        """
        rate = Rate(int(self.layout.half_bits[expert, projection]))
        k, n = self.layout.matrix(projection)
        first = int(self.layout.offsets[expert, projection])
        words = self.codes[first : first + self.layout.linear_words(expert, projection)]
        return words.view(torch.int16).view(k // TILE, n // TILE, rate.tile_words16), rate
