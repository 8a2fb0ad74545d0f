"""Owns the kernels of a whole layer, by key: those of the fused paths, and those that its ops take one by one.

It must not know `cutlass` or tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trellis_format.activations import Activation
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_kernels.cute.keys import DecodeKey, KernelKey
from trellis_kernels.cute.moe_key import MoeSmallKey
from trellis_kernels.cute.op_keys import ActivateKey, PackKey, ReduceKey, RotateKey
from trellis_kernels.cute.prefill_plan import PrefillPlan

__all__ = ["OpLayer", "layer_keys", "op_layer_keys"]

_BOTH = (True, False)


@dataclass(frozen=True, kw_only=True)
class OpLayer:
    """What the kernels of a layer that runs op by op depend on.

    Args:
        arch: compile target.
        codebook: its name.
        half_bits: every 2K that occurs.
        num_experts: experts of the rank.
        activation: the law.
        x_dtype: of x.
        out_dtype: of the result.
        hidden_block: channels of the Hadamard blocks of an intermediate Hadamard over the hidden axis; None without.
    """

    arch: str
    codebook: str
    half_bits: tuple[int, ...]
    num_experts: int
    activation: Activation
    x_dtype: str
    out_dtype: str
    hidden_block: int | None = None


def layer_keys(kernels: MoeSmallKey | PrefillPlan) -> tuple[KernelKey, ...]:
    """Every kernel that a fused layer may launch."""
    return kernels.keys if isinstance(kernels, PrefillPlan) else (kernels,)


def op_layer_keys(layer: OpLayer, ops: Sequence[str]) -> tuple[KernelKey, ...]:
    """Every kernel that some ops of a layer may launch, whatever the tokens of a run and the alignment of its tensors.

    Args:
        layer: what they depend on.
        ops: names of ops; those without kernels have no keys.
    """
    found = [key for op in ops if op in _KEYS for key in _KEYS[op](layer)]
    return tuple(dict.fromkeys(found))


def _decode(layer: OpLayer) -> tuple[KernelKey, ...]:
    return tuple(DecodeKey(layer.arch, layer.codebook, half_bits, "float16") for half_bits in layer.half_bits)


def _rotate(
    layer: OpLayer, side: str, in_dtype: str, out_dtype: str, *, narrow: bool, block: int = HADAMARD_BLOCK
) -> tuple[KernelKey, ...]:
    """Kernels for few and for many rows; a caller's tensor may also lie where lanes cannot read 16 bytes at once."""
    shapes = [(True, 1), *([(True, 4)] if block == HADAMARD_BLOCK else []), *([(False, 1)] if narrow else [])]
    return tuple(RotateKey(layer.arch, side, block, in_dtype, out_dtype, wide, rows) for wide, rows in shapes)


def _rotate_input(layer: OpLayer) -> tuple[KernelKey, ...]:
    between = _rotate(layer, "input", "float32", "float32", narrow=False)
    if layer.hidden_block is None:
        return (*_rotate(layer, "input", layer.x_dtype, "float32", narrow=True), *between)
    return (*_rotate(layer, "input", layer.x_dtype, "float32", narrow=True, block=layer.hidden_block), *between)


def _rotate_output(layer: OpLayer) -> tuple[KernelKey, ...]:
    between = _rotate(layer, "output", "float32", "float32", narrow=False)
    if layer.hidden_block is None:
        return between
    return (*between, *_rotate(layer, "output", "float32", layer.out_dtype, narrow=False, block=layer.hidden_block))


def _activate(layer: OpLayer) -> tuple[KernelKey, ...]:
    return (ActivateKey(layer.arch, layer.activation.kind),)


def _pack_routes(layer: OpLayer) -> tuple[KernelKey, ...]:
    classes = [size for size in PackKey.EXPERT_CLASSES if size >= layer.num_experts]
    if not classes:
        return ()  # a launch refuses so many experts
    stages = (PackKey(layer.arch, stage, classes[0], True) for stage in ("all", "count", "place"))
    return (*stages, PackKey(layer.arch, "offsets", PackKey.EXPERT_CLASSES[0], True))


def _reduce_routes(layer: OpLayer) -> tuple[KernelKey, ...]:
    out_dtype = layer.out_dtype if layer.hidden_block is None else "float32"  # which is rotated after the sum
    return tuple(ReduceKey(layer.arch, "ordered", "float32", out_dtype, wide) for wide in _BOTH)


_KEYS: dict[str, Callable[[OpLayer], tuple[KernelKey, ...]]] = {
    "decode": _decode,
    "rotate_input": _rotate_input,
    "rotate_output": _rotate_output,
    "activate": _activate,
    "pack_routes": _pack_routes,
    "reduce_routes": _reduce_routes,
}
