"""Owns which kernels of the few-token layer are compiled ahead of time, to stand for the others.

It must not know `cutlass`.  There are as many keys as layers, so these are the planned ones of a few: every codebook,
every arithmetic, direct and grouped, one and two products with one decoded weight.
"""

from __future__ import annotations

from trellis_format.activations import Activation
from trellis_kernels.cute.archs import get_arch
from trellis_kernels.cute.moe_key import MoeSmallKey, expert_class
from trellis_kernels.cute.moe_tilings import Shape, choose

__all__ = ["moe_small_keys"]

_TOP_K = 8
_MULTIPROCESSORS = 132
_CASES = (  # arithmetic, codebook, 2K, hidden and intermediate channels, experts, tokens
    ("bytes", "mul1", 6, 4096, 1408, 128, (1, 8)),
    ("exact", "mul1", 6, 2048, 768, 128, (1, 8, 128)),
    ("unrounded", "mul1", 6, 4096, 1408, 128, (128,)),
    ("exact", "mcg", 8, 2048, 768, 128, (1, 128)),
    ("exact", "mcg", 6, 7168, 256, 256, (1, 8)),
    ("exact", "3inst", 4, 2048, 768, 128, (8,)),
    ("exact", "lut_e4m3", 4, 2048, 768, 128, (8,)),
    ("exact", "lut_fp16", 10, 2048, 768, 128, (8,)),
)


def moe_small_keys(arch: str) -> tuple[MoeSmallKey, ...]:
    """Representative keys for one compile target, in a fixed order.

    Raises:
        KernelValueError: if the target is unknown.
    """
    get_arch(arch)
    return tuple(
        _key(Shape(arch, arithmetic, codebook, hidden, width, experts, _TOP_K), half_bits, tokens)
        for arithmetic, codebook, half_bits, hidden, width, experts, counts in _CASES
        for tokens in counts
    )


def _key(shape: Shape, half_bits: int, tokens: int) -> MoeSmallKey:
    choice = choose(shape, max_tokens=tokens, multiprocessors=_MULTIPROCESSORS)
    return MoeSmallKey(
        arch=shape.arch,
        codebook=shape.codebook,
        hidden=shape.padded_hidden,
        padded_hidden=shape.padded_hidden,
        width=shape.width,
        max_experts=expert_class(shape.num_experts),
        top_k=shape.top_k,
        gated=True,
        up_rates=(half_bits,),
        down_rates=(half_bits,),
        activation=Activation("silu"),
        arithmetic=shape.arithmetic,
        row_columns=choice.row_columns,
        direct=choice.direct,
        up=choice.up,
        down=choice.down,
    )
