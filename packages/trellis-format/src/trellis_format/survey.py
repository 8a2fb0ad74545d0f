"""Owns the sorting of a checkpoint's tensors: which class their bytes belong to, and why some are not linears.

It must not judge whether a linear is sound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from trellis_format.exl3.linear import LINEAR_SUFFIXES
from trellis_format.files.arrays import FileArray
from trellis_format.rates import ALL_RATES
from trellis_format.report import BytesByClass, Skipped

__all__ = [
    "SkipReason",
    "TensorClass",
    "class_of",
    "count_bytes",
    "flat_trellis_reason",
    "group_skipped",
    "skip_reason",
]

_SHARED = re.compile(r"(^|\.)shared_experts?(\.|$)")
_ROUTED = re.compile(r"(^|\.)experts\.(\d+(\.|$)|\w+_proj|w[123](\.|$))")
_HEAD = re.compile(r"([\w-]+\.){0,2}(lm_head|head|output)")
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|embed_in|embed|embeddings|word_embeddings|tok_embeddings|wte)")
_RANK_SLICED = re.compile(r"\.rank\d+(\.|$)")
_INDEX = re.compile(r"(?<!\w)\d+(?!\w)")
_EXCLUSIVE_SUFFIXES = frozenset(LINEAR_SUFFIXES) - {"bias", "scale"}  # names that no other format uses
_EMBEDDING_GROUP = 256  # weights of a quantised embedding that share a scale
_NGRAM_WIDTHS = {1 + 10 * rate.half_bits // 2 for rate in ALL_RATES if not rate.is_half}


class TensorClass(StrEnum):
    """What the bytes of a tensor belong to; the fields of `BytesByClass`."""

    EXPERTS = "experts"
    SHARED_EXPERTS = "shared_experts"
    LINEARS = "linears"
    HEAD = "head"
    EMBEDDINGS = "embeddings"
    OTHERS = "others"


class SkipReason(StrEnum):
    """Why tensors are not read as linears."""

    EMBEDDING = "quantised-embedding"
    NGRAM = "ngram-table"
    RANK_SLICED = "rank-sliced"
    LEGACY_SCALE = "legacy-scale"
    ORPHAN = "orphan"
    UNQUANTISED_EXPERT = "unquantised-expert"
    UNQUANTISED = "unquantised"

    @property
    def explanation(self) -> str:
        """The reason in words."""
        return _EXPLANATIONS[self]


_EXPLANATIONS = {
    SkipReason.EMBEDDING: "2-D trellis of a quantised embedding, which is no linear",
    SkipReason.NGRAM: "2-D trellis of a hashed n-gram table, which is no linear",
    SkipReason.RANK_SLICED: "rank-sliced dialect, which is not EXL3: each slice was quantised on its own",
    SkipReason.LEGACY_SCALE: "scale of files before the first release, which decoding does not use",
    SkipReason.ORPHAN: "named like a part of an EXL3 linear, but no trellis has that name",
    SkipReason.UNQUANTISED_EXPERT: "routed expert that is stored without quantisation",
    SkipReason.UNQUANTISED: "stored without quantisation",
}


@dataclass(frozen=True)
class _Group:
    reason: SkipReason
    pattern: str


def class_of(module: str, *, expert: bool, linear: bool) -> TensorClass:
    """The class of a module's bytes.

    Args:
        module: its name.
        expert: whether the pattern of expert names matches it.
        linear: whether it is an EXL3 linear.
    """
    if _SHARED.search(module):
        return TensorClass.SHARED_EXPERTS
    if expert or _ROUTED.search(module):
        return TensorClass.EXPERTS
    if _HEAD.fullmatch(module):
        return TensorClass.HEAD
    if _EMBEDDING.fullmatch(module):
        return TensorClass.EMBEDDINGS
    return TensorClass.LINEARS if linear else TensorClass.OTHERS


def count_bytes(sizes: Iterable[tuple[TensorClass, int]]) -> BytesByClass:
    """Add bytes up by class."""
    totals = dict.fromkeys(TensorClass, 0)
    for kind, nbytes in sizes:
        totals[kind] += nbytes
    return BytesByClass(**{kind.value: total for kind, total in totals.items()}, total=sum(totals.values()))


def flat_trellis_reason(shape: tuple[int, ...], *, signs: bool) -> SkipReason | None:
    """Why a 2-D trellis is no linear, None where its form is not known.

    Args:
        shape: of the trellis, `[rows, words]`.
        signs: whether the module has a tensor `signs`.
    """
    if len(shape) != 2:
        return None
    widths = [1 + _EMBEDDING_GROUP * rate.half_bits // 32 for rate in ALL_RATES if not rate.is_half]
    if signs and any(shape[1] and shape[1] % width == 0 for width in widths):
        return SkipReason.EMBEDDING
    return SkipReason.NGRAM if shape[1] in _NGRAM_WIDTHS else None


def skip_reason(name: str, kind: TensorClass) -> SkipReason:
    """Why a tensor outside every EXL3 linear is not read."""
    module, _, suffix = name.rpartition(".")
    if _RANK_SLICED.search(name):
        return SkipReason.RANK_SLICED
    if module and suffix in _EXCLUSIVE_SUFFIXES:
        return SkipReason.ORPHAN
    return SkipReason.UNQUANTISED_EXPERT if kind is TensorClass.EXPERTS else SkipReason.UNQUANTISED


def group_skipped(tensors: Mapping[str, tuple[SkipReason, FileArray]]) -> tuple[Skipped, ...]:
    """Group skipped tensors whose names differ in indices alone; the groups are in order of reason and pattern."""
    groups: dict[_Group, list[FileArray]] = defaultdict(list)
    for name, (reason, tensor) in tensors.items():
        groups[_Group(reason, _INDEX.sub("*", name))].append(tensor)
    order = list(SkipReason)
    return tuple(
        Skipped(
            reason=group.reason.value,
            explanation=group.reason.explanation,
            pattern=group.pattern,
            dtypes=tuple(sorted({tensor.entry.dtype for tensor in members})),
            tensors=len(members),
            bytes=sum(tensor.nbytes for tensor in members),
            example=min(tensor.entry.name for tensor in members),
        )
        for group, members in sorted(groups.items(), key=lambda item: (order.index(item[0].reason), item[0].pattern))
    )
