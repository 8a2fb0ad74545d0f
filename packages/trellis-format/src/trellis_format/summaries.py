"""Owns the arithmetic of a report: bits per weight, counts per projection, ranks that a layer divides over.

It must not look for what is wrong.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from trellis_format.exl3.linear import Exl3Linear
from trellis_format.exl3.names import ExpertName
from trellis_format.extent import BLOCK, BLOCK_SLOTS, SLOT
from trellis_format.hadamard import HADAMARD_BLOCK
from trellis_format.report import (
    BitsByClass,
    BitsPerWeight,
    ProjectionSummary,
    TensorParallel,
    Transforms,
)
from trellis_format.source import Projection
from trellis_format.survey import TensorClass

__all__ = [
    "add_bits",
    "bits_by_class",
    "bits_per_weight",
    "summarise_projections",
    "summarise_transforms",
    "tensor_parallel",
]


def bits_per_weight(linears: Iterable[Exl3Linear]) -> BitsPerWeight:
    """Bits per stored weight of some linears, with and without what lies beside the codes."""
    count = weights = codes = total = 0
    for linear in linears:
        count += 1
        weights += linear.k * linear.n
        codes += linear.trellis.nbytes * 8
        total += linear.nbytes * 8
    if not weights:
        return BitsPerWeight(linears=0, weights=0, codes=None, total=None)
    return BitsPerWeight(linears=count, weights=weights, codes=codes / weights, total=total / weights)


def bits_by_class(linears: Mapping[str, Exl3Linear], kinds: Mapping[str, TensorClass]) -> BitsByClass:
    """Bits per weight of all linears and of each class.

    Args:
        linears: by name.
        kinds: the class of each, by the same names.
    """

    def of(kind: TensorClass) -> BitsPerWeight:
        return bits_per_weight(linear for name, linear in linears.items() if kinds[name] is kind)

    return BitsByClass(
        model=bits_per_weight(linears.values()),
        experts=of(TensorClass.EXPERTS),
        shared_experts=of(TensorClass.SHARED_EXPERTS),
        linears=of(TensorClass.LINEARS),
        head=of(TensorClass.HEAD),
    )


def summarise_projections(
    names: Mapping[str, ExpertName], linears: Mapping[str, Exl3Linear]
) -> tuple[ProjectionSummary, ...]:
    """What the experts of one layer are, projection by projection.

    Args:
        names: what the layer's module names say.
        linears: the sound ones among them, by name.
    """
    return tuple(
        _projection(
            projection,
            [linears[name] for name, says in names.items() if name in linears and says.projection is projection],
        )
        for projection in Projection
        if any(says.projection is projection for says in names.values())
    )


def _projection(projection: Projection, linears: list[Exl3Linear]) -> ProjectionSummary:
    def count(key: Callable[[Exl3Linear], str]) -> dict[str, int]:
        return dict(sorted(Counter(map(key, linears)).items()))

    return ProjectionSummary(
        projection=projection.value,
        shapes=count(lambda linear: f"{linear.k} x {linear.n}"),
        rates=count(lambda linear: str(linear.rate)),
        codebooks=count(lambda linear: linear.codebook.name),
        biased=sum("bias" in linear.tensors for linear in linears),
        bytes=sum(linear.nbytes for linear in linears),
    )


def add_bits(*parts: BitsPerWeight) -> BitsPerWeight:
    """Bits per stored weight of several sets of linears together; None where one of them is not known."""
    weights = sum(part.weights for part in parts)
    filled = [part for part in parts if part.weights]

    def mean(values: Iterable[tuple[float | None, int]]) -> float | None:
        known = [(value, share) for value, share in values if value is not None]
        return sum(value * share for value, share in known) / weights if known and len(known) == len(filled) else None

    return BitsPerWeight(
        linears=sum(part.linears for part in parts),
        weights=weights,
        codes=mean((part.codes, part.weights) for part in filled),
        total=mean((part.total, part.weights) for part in filled),
    )


def tensor_parallel(
    padded_intermediate_size: int, *, alignment_slots: int = BLOCK_SLOTS, barriers: Sequence[int] = ()
) -> TensorParallel:
    """How an intermediate axis divides over ranks, in whole Hadamard blocks at least.

    Args:
        padded_intermediate_size: channels.
        alignment_slots: slots that a container's cuts are multiples of.
        barriers: slots that no share may reach across.
    """
    blocks, grain = padded_intermediate_size // BLOCK, math.lcm(alignment_slots, BLOCK_SLOTS)
    units, rest = divmod(padded_intermediate_size, grain * SLOT)
    legal = not rest and all(barrier % grain == 0 for barrier in barriers)
    even = tuple(
        world
        for world in range(1, units + 1)
        if legal and units % world == 0 and all(barrier % (units // world * grain) == 0 for barrier in barriers)
    )
    return TensorParallel(
        blocks=blocks,
        even=even,
        largest=units if legal else 0,
        alignment_slots=grain,
        barriers=tuple(sorted(barriers)),
    )


def summarise_transforms(linears: Iterable[Exl3Linear]) -> Transforms:
    """How the weights of some linears are rotated."""
    forms = Counter("suh" in linear.tensors and "svh" in linear.tensors for linear in linears)
    return Transforms(
        kind="scaled_hadamard",
        block_size=HADAMARD_BLOCK,
        linears_with_vectors=forms[True],
        linears_with_packed_signs=forms[False],
    )
