"""Owns the float64 truth: linears and expert layers computed from the exact codes.  It must not be fast.

Everything is decoded by the numpy law and multiplied in float64 with no intermediate rounding, so that an
implementation's distance from it is its own error.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trellis_format.activations import Activation
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.hadamard import hadamard
from trellis_format.rates import Rate
from trellis_format.signs import SignAxis, expert_signs
from trellis_format.slots import read_linear
from trellis_format.source import Projection, TrellisSource, TrellisWeights
from trellis_format.tiles import decode_inner
from trellis_format.transform import interleave

__all__ = ["linear", "moe_forward", "reconstruct"]

_Double = npt.NDArray[np.float64]


def reconstruct(
    trellis: npt.NDArray[np.int16],
    suh: npt.NDArray[np.float16],
    svh: npt.NDArray[np.float16],
    codebook: str,
    rate: Rate,
) -> _Double:
    """The weight in the original basis, W = diag(suh) H W_inner H diag(svh).

    Args:
        trellis: `[k_tiles, n_tiles, 16*K] int16`.
        suh: `[k] float16`.
        svh: `[n] float16`.
        codebook: its name.
        rate: K.

    Returns:
        `[k, n] float64`.
    """
    inner = decode_inner(trellis, get_codebook(codebook), rate).astype(np.float64)
    left = hadamard(inner.T).T * suh.astype(np.float64)[:, None]
    return hadamard(left) * svh.astype(np.float64)


def linear(
    x: npt.NDArray[np.floating],
    trellis: npt.NDArray[np.int16],
    suh: npt.NDArray[np.float16],
    svh: npt.NDArray[np.float16],
    codebook: str,
    rate: Rate,
    bias: npt.NDArray[np.float16] | None = None,
) -> _Double:
    """The product of a linear, (((x * suh) H) W_inner H) * svh + bias.

    Args:
        x: `[rows, k]`.
        trellis: `[k_tiles, n_tiles, 16*K] int16`.
        suh: `[k] float16`.
        svh: `[n] float16`.
        codebook: its name.
        rate: K.
        bias: `[n] float16` or None.

    Returns:
        `[rows, n] float64`.
    """
    rotated = hadamard(x.astype(np.float64) * suh.astype(np.float64))
    inner = decode_inner(trellis, get_codebook(codebook), rate).astype(np.float64)
    y = hadamard(rotated @ inner) * svh.astype(np.float64)
    return y if bias is None else y + bias.astype(np.float64)


def moe_forward(
    source: TrellisSource,
    weights: TrellisWeights,
    x: npt.NDArray[np.floating],
    topk_ids: npt.NDArray[np.integer],
    topk_weights: npt.NDArray[np.floating],
    *,
    activation: Activation | None = None,
    extent: TrellisExtent | None = None,
) -> _Double:
    """The routed experts of one layer.

    Args:
        source: the layer.
        weights: its arrays, over the source's extent.
        x: `[tokens, hidden]`.
        topk_ids: `[tokens, top_k]`; an id outside [0, experts) is no expert.
        topk_weights: `[tokens, top_k]`.
        activation: overrides the source's.
        extent: the share of the intermediate axis to sum over (default: what the weights cover).  The down bias
            belongs to the share that begins at channel 0.

    Returns:
        `[tokens, hidden] float64`, the sum over each token's routes and the extent's channels.

    Raises:
        FormatValueError: if no activation is known, x is not as wide as the layer, ids and weights differ in shape, or
            the extent is of another axis, not inside the source's, or cuts a block, or sign patterns are missing or
            not wanted.
    """
    law = activation or source.activation
    if law is None:
        raise FormatValueError("the model's configuration names no known activation; give one")
    if (source.expert_transform is None) != (weights.expert_sign_patterns is None):
        raise FormatValueError("an intermediate Hadamard and expert_sign_patterns come together or not at all")
    geometry = source.geometry
    share = extent or source.extent
    _check_share(share, source.extent)
    if x.ndim != 2 or x.shape[1] != geometry.hidden_size:
        raise FormatValueError(f"x must be [tokens, {geometry.hidden_size}], got shape {x.shape}")
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[:1] != x.shape[:1] or topk_ids.ndim != 2:
        raise FormatValueError(
            f"ids {topk_ids.shape} and weights {topk_weights.shape} must both be [{x.shape[0]}, top_k]"
        )
    padded = np.zeros((x.shape[0], geometry.padded_hidden_size))
    padded[:, : x.shape[1]] = x
    transform = source.expert_transform
    if transform is not None:
        padded = hadamard(padded, transform.pre_block)
    y = np.zeros_like(padded)
    for expert in range(geometry.num_experts):
        token, slot = np.nonzero(topk_ids == expert)
        if token.size:
            out = _expert_forward(source, weights, padded[token], expert, law, share)
            factor = topk_weights[token, slot].astype(np.float64) * source.up_divisor
            np.add.at(y, token, out * factor[:, None])
    if transform is not None:
        y = hadamard(y, transform.pre_block)
    return y[:, : geometry.hidden_size]


def _check_share(share: TrellisExtent, held: TrellisExtent) -> None:
    share.check_blocks()
    sizes = share.global_intermediate_size, held.global_intermediate_size
    if sizes[0] != sizes[1]:
        raise FormatValueError(f"extent is of an axis of {sizes[0]} channels, the layer has {sizes[1]}")
    if share.first_channel < held.first_channel or share.end_channel > held.end_channel:
        raise FormatValueError(
            f"extent of channels {share.first_channel}..{share.end_channel} is not inside the held "
            f"{held.first_channel}..{held.end_channel}"
        )


def _expert_forward(
    source: TrellisSource, weights: TrellisWeights, x: _Double, expert: int, law: Activation, share: TrellisExtent
) -> _Double:
    local = slice(share.first_channel - source.extent.first_channel, share.end_channel - source.extent.first_channel)
    branches = _first_gemms if source.expert_transform is None else _transformed_gemms
    joined = branches(source, weights, x, expert, law, share, local)
    last = len(source.geometry.projections) - 1
    trellis = read_linear(source, weights, expert, last, share)
    outputs = weights.output_scales if source.shared_output_scales else weights.output_scales[expert]
    suh = weights.intermediate_scales[expert, last, local]
    y = linear(joined, trellis, suh, outputs, source.codebook, source.rates.rate(expert, last))
    if Projection.DOWN in weights.biases and share.first_channel == 0:
        y = y + weights.biases[Projection.DOWN][expert].astype(np.float64)
    return y


def _first_gemms(
    source: TrellisSource, weights: TrellisWeights, x: _Double, expert: int, law: Activation, share: TrellisExtent,
    local: slice,
) -> _Double:  # fmt: skip
    inputs = weights.input_scales if source.shared_input_scales else weights.input_scales[expert]
    branches: dict[Projection, _Double] = {}
    for index, projection in enumerate(source.geometry.projections[:-1]):
        svh = weights.intermediate_scales[expert, index, local]
        trellis = read_linear(source, weights, expert, index, share)
        y = linear(x, trellis, inputs[index % len(inputs)], svh, source.codebook, source.rates.rate(expert, index))
        if projection in weights.biases:
            y = y + weights.biases[projection][expert, local].astype(np.float64)
        branches[projection] = y
    return law.apply(branches.get(Projection.GATE), branches[Projection.UP])


def _transformed_gemms(
    source: TrellisSource, weights: TrellisWeights, x: _Double, expert: int, law: Activation, share: TrellisExtent,
    local: slice,
) -> _Double:  # fmt: skip
    assert source.expert_transform is not None
    assert weights.expert_sign_patterns is not None
    inputs = weights.input_scales if source.shared_input_scales else weights.input_scales[expert]
    rotated = hadamard(x * inputs[0].astype(np.float64))
    stored = []
    for index in (0, 1):
        trellis = read_linear(source, weights, expert, index, share)
        inner = decode_inner(trellis, get_codebook(source.codebook), source.rates.rate(expert, index))
        stored.append(rotated @ inner.astype(np.float64))
    scales = [weights.intermediate_scales[expert, index, local].astype(np.float64) for index in (0, 1)]
    patterns = weights.expert_sign_patterns[expert : expert + 1]
    before, after = (expert_signs(patterns, axis, share)[0].astype(np.float64) for axis in SignAxis)
    values = hadamard(hadamard(interleave(*stored)) * interleave(*scales)) * before
    joined = law.apply(np.ascontiguousarray(values[:, 0::2]), np.ascontiguousarray(values[:, 1::2]))
    return hadamard(joined * after, source.expert_transform.post_block)
