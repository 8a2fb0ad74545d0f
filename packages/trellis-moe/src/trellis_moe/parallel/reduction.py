"""Owns the declaration of how ranks' outputs become one: what crosses, in which dtype, in which order.

It must not know process groups or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.specs import IO_DTYPES

__all__ = ["COLLECTIVES", "EXPERT_SUMS", "ORDERS", "TRANSPORTS", "ReduceSpec"]

COLLECTIVES = ("all_reduce", "reduce_scatter", "none")
"""What a run leaves on a rank.

    all_reduce      every token's sum over all ranks
    reduce_scatter  that sum for the rank's own part of the tokens, in the order of ranks
    none            the rank's own partial sum of every token
"""
EXPERT_SUMS = ("ordered", "partial")
"""What expert-parallel ranks exchange.

    ordered  the rows of single routes, which every rank then adds in slot order: the bits of one rank that holds all
             experts, for top_k times the bytes
    partial  each rank's sum of its own routes: fewer bytes, and sums that depend on who holds what
"""
ORDERS = ("ranks", "any")
"""In which order partial sums are added.

    ranks  one rank after the other, so that a token's bits do not depend on its place in the batch
    any    as the process group does; above two ranks a ring's order follows the place in the message
"""
TRANSPORTS = ("group", "copies")
"""What carries partial sums that are added in the order of ranks.

    group   collectives of the process group
    copies  copy engines, into memory that the ranks map: CUDA devices of one host; takes no multiprocessors from the
            piece that is computed meanwhile, and adds in the order of ranks from two ranks on
"""


@dataclass(frozen=True, kw_only=True)
class ReduceSpec:
    """How ranks' outputs become one.

    Args:
        collective: one of `COLLECTIVES`.
        dtype: in which partial sums cross and are added: `float32`, or the dtype of the result, which is half the
            bytes and rounds each rank's part first.  Rows of an ordered sum over experts cross as they are.
        experts: one of `EXPERT_SUMS`; says nothing where experts are not split.
        order: one of `ORDERS`; says nothing up to two ranks, whose sum has one order.
        transport: one of `TRANSPORTS`.
        overlap_tokens: tokens of a piece; while the sums of one piece cross, the next one is computed.  None is one
            piece.  Ordered sums over experts are not overlapped.
        one_shot_bytes: most bytes of partial sums for which each rank reads its peers' memory directly, on CUDA
            devices of one host that can; more go through the process group.  0 is never.

    Raises:
        MoeTypeError: if a number is not an int.
        MoeValueError: if a name is unknown or a number is out of range, or copies are to add in any order.
    """

    collective: str = "all_reduce"
    dtype: str = "float32"
    experts: str = "ordered"
    order: str = "ranks"
    transport: str = "group"
    overlap_tokens: int | None = None
    one_shot_bytes: int = 0

    def __post_init__(self) -> None:
        for name, known in (
            ("collective", COLLECTIVES), ("dtype", tuple(IO_DTYPES)), ("experts", EXPERT_SUMS), ("order", ORDERS),
            ("transport", TRANSPORTS),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise MoeValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        for name, least in (("overlap_tokens", 1), ("one_shot_bytes", 0)):
            value = getattr(self, name)
            if value is None and name == "overlap_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise MoeTypeError(f"{name} must be an int, got {type(value).__name__}")
            if value < least:
                raise MoeValueError(f"{name} must be at least {least}, got {value}")
        if self.transport == "copies" and self.order != "ranks":
            raise MoeValueError(f"transport 'copies' adds in the order of ranks, got order {self.order!r}")
