"""Owns the layers that are measured: sizes of well-known models, and the codes that they are measured with.

It must not know a device.  Sizes are those of one rank: where ranks share a layer, the intermediate channels are a
rank's, and the name says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from trellis_format.activations import Activation
from trellis_format.source import TrellisSource
from trellis_kernels.bench.layers import random_source
from trellis_moe.errors import MoeValueError

__all__ = ["PRESETS", "TINY", "Preset", "get_preset"]


@dataclass(frozen=True)
class Preset:
    """A layer of routed experts.

    Args:
        name: of the model, with the ranks that share it.
        experts: how many.
        hidden: hidden channels.
        intermediate: intermediate channels of the rank's share.
        top_k: routes of a token.
        codebook: of the codes.
        k: rate.
        activation: the law.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    codebook: str
    k: str
    activation: Activation = Activation("silu")  # noqa: RUF009  # frozen

    @property
    def key(self) -> str:
        """The name in lower-case words joined by hyphens, then codebook and rate."""
        return f"{self.name.lower().replace(' ', '-')}:{self.codebook}:{self.k}"

    @property
    def weights_per_expert(self) -> int:
        """Weights of gate, up and down."""
        return 3 * self.hidden * self.intermediate

    def source(self) -> TrellisSource:
        """The layer's description; experts, gate and up have input vectors of their own."""
        return _source(self)


@lru_cache(maxsize=32)
def _source(preset: Preset) -> TrellisSource:
    """One object for equal presets: its table of rates is large, and it is asked for at every token count."""
    return random_source(
        experts=preset.experts,
        hidden=preset.hidden,
        intermediate=preset.intermediate,
        codebook=preset.codebook,
        rates=[preset.k],
        activation=preset.activation,
    )


_GLM = Preset("GLM-4.5-Air", 128, 4096, 1408, 8, "mul1", "3")
_QWEN = Preset("Qwen3-30B-A3B", 128, 2048, 768, 8, "mul1", "3")
_DSV3 = Preset("DeepSeek-V3", 256, 7168, 2048, 8, "mcg", "3")
_MIXTRAL = Preset("Mixtral-8x7B", 8, 4096, 14336, 2, "mul1", "3")
_KIMI = Preset("Kimi-K3 TP9", 896, 3584, 384, 16, "mcg", "2", Activation.named("situ"))

PRESETS: dict[str, Preset] = {
    preset.key: preset
    for preset in (
        _GLM,
        _QWEN,
        replace(_QWEN, codebook="mcg", k="4"),
        replace(_QWEN, k="2"),
        replace(_DSV3, name="DeepSeek-V3 TP8", intermediate=256),
        _DSV3,
        _KIMI,
        _MIXTRAL,
    )
}
"""Layers by key.  Kimi-K3 at TP9 is a rank with 12 of the 96 slots; its experts live in a latent space of 3,584."""

TINY = Preset("tiny", 4, 128, 128, 2, "mul1", "3")
"""A layer that a CPU runs in milliseconds; for rehearsals."""


def get_preset(text: str) -> Preset:
    """The preset of a key; `model` alone is its first codebook and rate, `model:codebook:K` any other.

    Raises:
        MoeValueError: if the model is unknown.
        FormatValueError: if the codebook is unknown, or K is not legal for it.
    """
    known = {**PRESETS, TINY.key: TINY}
    if text in known:
        return known[text]
    model, *codes = text.split(":")
    found = next((preset for preset in known.values() if preset.key.split(":")[0] == model), None)
    if found is None or len(codes) not in (0, 2):
        models = ", ".join(dict.fromkeys(key.split(":")[0] for key in known))
        raise MoeValueError(f"{text!r} is no layer that is known; give MODEL or MODEL:CODEBOOK:K, MODEL of {models}")
    if codes:
        found = replace(found, codebook=codes[0], k=codes[1])
        found.source()  # refuses what is not legal
    return found
