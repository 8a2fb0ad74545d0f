"""Owns the names that architectures give to routed experts.  It must not know what the tensors hold.

Every architecture stores one linear per expert and projection under `...layers.L....experts.E.<projection>`; they
differ in the path around it and in the word for the projection.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trellis_format.errors import FormatArgumentError, FormatUnsupportedError, FormatValueError
from trellis_format.source import Projection

__all__ = ["DEFAULT_PATTERN", "PROJECTION_NAMES", "ExpertName", "compile_pattern", "match_expert"]

PROJECTION_NAMES: dict[str, Projection] = {
    "gate_proj": Projection.GATE,
    "up_proj": Projection.UP,
    "down_proj": Projection.DOWN,
    "w1": Projection.GATE,
    "w3": Projection.UP,
    "w2": Projection.DOWN,
}
"""Projection by its name in checkpoints."""

DEFAULT_PATTERN = (
    r"(?P<prefix>(?:.+\.)?layers\.(?P<layer>\d+)\.(?:[\w-]+\.)*?experts)\.(?P<expert>\d+)\."
    r"(?P<projection>" + "|".join(PROJECTION_NAMES) + ")"
)
"""Regular expression of an expert linear's module name, with groups prefix, layer, expert and projection."""

_RANK_SLICED = re.compile(r"\.experts\.\d+\.\w+\.rank(\d+)(?:\.|$)")
_MAX_DIGITS = 9  # an index of more digits is not an expert or a layer
_MAX_NAME = 1024  # characters; a longer name is not an expert's, and matching one may take quadratic time


@dataclass(frozen=True)
class ExpertName:
    """What a module name says: the path of the layer's experts, layer, expert, projection."""

    prefix: str
    layer: int
    expert: int
    projection: Projection


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Check and compile a pattern of expert names.

    Args:
        pattern: a regular expression that matches whole module names, with groups layer, expert, projection, and
            optionally prefix.

    Raises:
        FormatArgumentError: if it is not a regular expression or lacks a group.
    """
    try:
        compiled = re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:  # the latter two of a count or a nesting out of reach
        raise FormatArgumentError(f"pattern {pattern[:200]!r} is not a regular expression: {error}") from error
    lacking = {"layer", "expert", "projection"} - set(compiled.groupindex)
    if lacking:
        raise FormatArgumentError(f"pattern {pattern!r} lacks the groups {', '.join(sorted(lacking))}")
    return compiled


def match_expert(name: str, pattern: re.Pattern[str]) -> ExpertName | None:
    """What a module name says about an expert, None where it is not an expert's.

    Raises:
        FormatUnsupportedError: if the name is of the rank-sliced dialect.
        FormatValueError: if a user's pattern matches a projection word that is not known.
    """
    if len(name) > _MAX_NAME:
        return None
    sliced = _RANK_SLICED.search(name)
    if sliced:
        raise FormatUnsupportedError(
            f"rank-sliced dialect (rank {sliced[1]}): each slice was quantised on its own and is not EXL3", tensor=name
        )
    match = pattern.fullmatch(name)
    if match is None:
        return None
    layer, expert, word = match["layer"], match["expert"], match["projection"]
    if layer is None or expert is None or word is None:  # a user's group may be optional
        return None
    if not (layer.isdecimal() and expert.isdecimal()) or max(len(layer), len(expert)) > _MAX_DIGITS:
        return None
    projection = PROJECTION_NAMES.get(word) or next((known for known in Projection if known == word), None)
    if projection is None:
        raise FormatValueError(
            f"projection {word!r} is not known; known: {', '.join((*PROJECTION_NAMES, *Projection))}", tensor=name
        )
    prefix = match["prefix"] if "prefix" in pattern.groupindex else None
    prefix = prefix or name[: match.start("expert")].rstrip(".")
    return ExpertName(prefix, int(layer), int(expert), projection)
