"""Owns `TrellisLinear`, the module that stands for a quantised linear of a model.  It must not know checkpoints.

Its arithmetic is one custom op, so that graphs of torch.compile and CUDA can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from trellis_format.rates import Rate
from trellis_kernels.linear import linear
from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.specs import io_dtype_name
from trellis_prep import PreparedLinear

__all__ = ["TrellisLinear"]


@torch.library.custom_op("trellis::linear", mutates_args=())
def _linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    input_scale: torch.Tensor,
    output_scale: torch.Tensor,
    bias: torch.Tensor | None,
    codebook: str,
    half_bits: int,
    out_features: int,
) -> torch.Tensor:
    """`trellis_kernels.linear` of x `[rows, in]`; gives `[rows, out_features]` in x's dtype."""
    weight = PreparedLinear(codebook, Rate(half_bits), codes, input_scale, output_scale, bias)
    out = torch.empty(x.shape[0], weight.n, dtype=x.dtype, device=x.device)
    linear(x, weight, out=out)
    return out if weight.n == out_features else out[:, :out_features].clone()


@_linear.register_fake
def _linear_fake(
    x: torch.Tensor,
    codes: torch.Tensor,  # noqa: ARG001  # the signature is the op's
    input_scale: torch.Tensor,  # noqa: ARG001  # the signature is the op's
    output_scale: torch.Tensor,  # noqa: ARG001  # the signature is the op's
    bias: torch.Tensor | None,  # noqa: ARG001  # the signature is the op's
    codebook: str,  # noqa: ARG001  # the signature is the op's
    half_bits: int,  # noqa: ARG001  # the signature is the op's
    out_features: int,
) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


class TrellisLinear(nn.Module):
    """y = x @ W + bias on trellis codes, for inference.

    It runs on the device of its weight, for any number of tokens, in the dtype of x.  Moving the module moves the
    weight and never casts it, since codes and scales have one dtype.

    Args:
        weight: the linear on its device.
        in_features: true input channels, at most the stored ones.
        out_features: true output channels, at most the stored ones.

    Raises:
        MoeTypeError: if the weight is not a `PreparedLinear`.
        MoeValueError: if a width is not positive or exceeds the stored one; names both.
    """

    def __init__(self, weight: PreparedLinear, in_features: int | None = None, out_features: int | None = None) -> None:
        super().__init__()
        if not isinstance(weight, PreparedLinear):
            raise MoeTypeError(f"weight must be a PreparedLinear, got {type(weight).__name__}")
        self.in_features = _width("in_features", in_features, weight.k)
        self.out_features = _width("out_features", out_features, weight.n)
        self._weight = weight

    @property
    def prepared(self) -> PreparedLinear:
        """The linear on its device."""
        return self._weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the linear.

        Args:
            x: `[..., in_features]` float16, bfloat16 or float32, on the weight's device.

        Returns:
            `[..., out_features]` in x's dtype.

        Raises:
            MoeTypeError, MoeValueError: if x has another dtype, device or width.
        """
        io_dtype_name(x.dtype)
        if x.shape[-1] != self.in_features:
            raise MoeValueError(f"x has {x.shape[-1]} channels, the linear takes {self.in_features}")
        weight = self._weight
        if x.device != weight.device:
            raise MoeTypeError(f"x must be on {weight.device}, got {x.device}")
        rows = x.reshape(-1, self.in_features).contiguous()
        y: torch.Tensor = _linear(
            rows,
            weight.codes,
            weight.input_scale,
            weight.output_scale,
            weight.bias,
            weight.codebook,
            weight.rate.half_bits,
            self.out_features,
        )
        return y.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        weight = self._weight
        bias = weight.bias is not None
        return f"{self.in_features}, {self.out_features}, {weight.codebook}, K={weight.rate}, bias={bias}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> TrellisLinear:
        """Follow `fn` to another device; torch's own casts of a module's dtype leave a weight alone."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        device = fn(torch.empty(0, dtype=torch.int16, device=self._weight.device)).device
        weight = self._weight
        if device != weight.device:
            self._weight = replace(
                weight,
                codes=weight.codes.to(device),
                input_scale=weight.input_scale.to(device),
                output_scale=weight.output_scale.to(device),
                bias=None if weight.bias is None else weight.bias.to(device),
            )
        return self


def _width(name: str, given: int | None, stored: int) -> int:
    width = stored if given is None else given
    if not 0 < width <= stored:
        raise MoeValueError(f"{name} {width} must be from 1 to the {stored} stored channels")
    return width
