"""Owns `exl3-manifest.json`: what a container declares about all of its layer files.  It must not read them.

Everything is refused that is not declared here: unknown keys at every level, and values that do not fit each other.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trellis_format.codebooks.summed_halves import MCG
from trellis_format.extent import SLOT
from trellis_format.files.strict_json import read_json
from trellis_format.rate_bytes import unpack_rates
from trellis_format.rates import TILE, Rate
from trellis_format.schema import StrictModel, emit_json, parse_model, refuse_key

__all__ = [
    "CONTAINER_BITS",
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "PAIR_KINDS",
    "PAIR_SLOTS",
    "SCHEMA",
    "Geometry",
    "Hadamard",
    "LayerEntry",
    "Layout",
    "Manifest",
    "ManifestHead",
    "Rates",
    "layer_file_name",
    "parse_manifest",
    "read_manifest",
]

MANIFEST_NAME = "exl3-manifest.json"
"""Name of the manifest in its directory."""
SCHEMA = "exl3-v1"
"""Version of the container."""
CONTAINER_BITS = {"mcg": (3, 4, 5, 6), "lut_e4m3": (2, 3, 4), "lut_fp16": (5, 6)}
"""Codebooks of this container, and K that it has for each; narrower than what the codebooks are defined for."""
PAIR_KINDS = {"P22": 0x22, "P33": 0x33, "P24": 0x24, "P43": 0x43, "P44": 0x44}
"""Rate byte of each kind of pair: K of its low-rate and its high-rate record of 128 channels."""
MAX_MANIFEST_BYTES = 64 << 20
"""Largest manifest that is read, in bytes; one layer takes about 150."""
PAIR_SLOTS = 8
"""Slots of a pair of records."""

_Positive = Annotated[int, Field(gt=0)]
_Index = Annotated[int, Field(ge=0)]
_LAX = Field(strict=False)  # a JSON array is a list and becomes a tuple; its elements stay strict


class Geometry(StrictModel):
    """Sizes of every layer.

    Attributes:
        num_experts: experts of a layer.
        hidden_size: channels that an expert takes and gives, a multiple of 16.
        intermediate_size: channels between the two GEMMs, over all ranks.
        slot_channels: channels of a slot, 32.
        num_slots: slots of the intermediate axis.
        moe_layer_indices: indices of the layers that have experts.
    """

    num_experts: _Positive
    hidden_size: Annotated[int, Field(gt=0, multiple_of=TILE)]
    intermediate_size: Annotated[int, Field(gt=0, multiple_of=SLOT)]
    slot_channels: Literal[32]
    num_slots: _Positive
    moe_layer_indices: Annotated[tuple[_Index, ...], _LAX]

    @model_validator(mode="after")
    def _check(self) -> Self:
        slots = self.intermediate_size // SLOT
        if self.num_slots != slots:
            raise refuse_key("num_slots", f"is {self.num_slots}, {self.intermediate_size} channels are {slots} slots")
        if not self.moe_layer_indices:
            raise refuse_key("moe_layer_indices", "must name at least one layer")
        if len(set(self.moe_layer_indices)) != len(self.moe_layer_indices):
            raise refuse_key("moe_layer_indices", f"must be distinct, got {list(self.moe_layer_indices)[:16]}")
        return self


class Rates(StrictModel):
    """Rates of every layer.

    Attributes:
        structure: one K for all, or a rate byte for each expert and pair of records.
        bits: K, with `uniform`.
        pair_kinds: kinds of pairs that occur, with `per_expert_pair`.
    """

    structure: Literal["uniform", "per_expert_pair"]
    bits: Annotated[int, Field(ge=2, le=6)] | None = None
    pair_kinds: Annotated[tuple[Literal["P22", "P33", "P24", "P43", "P44"], ...], _LAX] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key, structure in (("bits", "uniform"), ("pair_kinds", "per_expert_pair")):
            given, wanted = getattr(self, key) is not None, self.structure == structure
            if given != wanted:
                raise refuse_key(key, f"{'missing' if wanted else 'unknown'} key for structure {self.structure!r}")
        kinds = self.pair_kinds
        if kinds is not None and (not kinds or len(set(kinds)) != len(kinds)):
            raise refuse_key("pair_kinds", f"must be distinct and at least one, got {list(kinds)}")
        return self

    @property
    def pairs(self) -> bool:
        """Whether rates vary over pairs of records."""
        return self.pair_kinds is not None

    def distinct(self) -> set[int]:
        """Every K that may occur."""
        if self.bits is not None:
            return {self.bits}
        rates = {rate for kind in self.pair_kinds or () for rate in unpack_rates(PAIR_KINDS[kind])}
        return {rate.half_bits // 2 for rate in rates}


class Hadamard(StrictModel):
    """Transforms of every layer.

    Attributes:
        intermediate_hadamard: whether experts were quantised under an intermediate Hadamard.
        per_expert_input_rotations: whether every expert has its own input and output vectors.
        pre_block: channels of its blocks over the hidden axis; only with the transform.
        post_block: channels of its blocks over the intermediate axis; only with the transform.
    """

    intermediate_hadamard: bool
    per_expert_input_rotations: bool
    pre_block: Annotated[int, Field(gt=0, multiple_of=SLOT)] | None = None
    post_block: Annotated[int, Field(gt=0, multiple_of=SLOT)] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("pre_block", "post_block"):
            given, wanted = getattr(self, key) is not None, self.intermediate_hadamard
            if given != wanted:
                word = "missing" if wanted else "unknown"
                raise refuse_key(key, f"{word} key where intermediate_hadamard is {str(wanted).lower()}")
        return self


class Layout(StrictModel):
    """How rows lie, and where the intermediate axis may be cut.

    Attributes:
        row_alignment: bytes that the length of a row of codes is a multiple of.
        extent_alignment_slots: slots that both ends of an extent are a multiple of; divides the number of slots.
        extent_barriers: slots that no extent may reach across.
    """

    row_alignment: _Positive
    extent_alignment_slots: _Positive
    extent_barriers: Annotated[tuple[int, ...], _LAX] = ()


class LayerEntry(StrictModel):
    """A layer file and its digest."""

    file: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]


class ManifestHead(StrictModel):
    """The manifest without its layers: what all layer files have in common."""

    kind: Literal["exl3-manifest"]
    schema_name: Literal["exl3-v1"] = Field(alias="schema")
    codebook: Literal["mcg", "lut_e4m3", "lut_fp16"]
    codebook_seed: int | None = None
    geometry: Geometry
    rates: Rates
    hadamard: Hadamard
    layout: Layout

    @model_validator(mode="after")
    def _check_head(self) -> Self:
        self._check_codebook()
        geometry, layout = self.geometry, self.layout
        if geometry.num_slots % layout.extent_alignment_slots:
            raise refuse_key(
                "layout.extent_alignment_slots",
                f"{layout.extent_alignment_slots} does not divide the {geometry.num_slots} slots",
            )
        barriers = layout.extent_barriers
        if len(set(barriers)) != len(barriers) or not all(0 < barrier < geometry.num_slots for barrier in barriers):
            raise refuse_key(
                "layout.extent_barriers", f"must be distinct slots in 1..{geometry.num_slots - 1}, got {list(barriers)}"
            )
        if self.rates.pairs and geometry.num_slots % PAIR_SLOTS:
            raise refuse_key(
                "rates.structure", f"pair rates need slots in multiples of {PAIR_SLOTS}, got {geometry.num_slots}"
            )
        for key, axis in (("pre_block", "hidden_size"), ("post_block", "intermediate_size")):
            block, size = getattr(self.hadamard, key), getattr(geometry, axis)
            if block is not None and size % block:
                raise refuse_key(f"hadamard.{key}", f"{block} does not divide {axis} {size}")
        return self

    def _check_codebook(self) -> None:
        seed = MCG.multiplier if self.codebook == MCG.name else None
        if self.codebook_seed != seed:
            wanted = f"must be 0x{seed:08X} ({seed})" if seed is not None else "is unknown"
            shown = "nothing" if self.codebook_seed is None else f"0x{self.codebook_seed:X}"
            raise refuse_key("codebook_seed", f"{wanted} for codebook {self.codebook}, got {shown}")
        legal = CONTAINER_BITS[self.codebook]
        for bits in sorted(self.rates.distinct() - set(legal)):
            key = "rates.bits" if self.rates.bits is not None else "rates.pair_kinds"
            raise refuse_key(key, f"codebook {self.codebook} has no K = {bits} here; legal K: {_listed(legal)}")

    @property
    def uniform_rate(self) -> Rate | None:
        """The one rate, or None with pair rates."""
        return None if self.rates.bits is None else Rate(2 * self.rates.bits)

    def layer_metadata(self, layer: int) -> dict[str, str]:
        """What the metadata of a layer file states."""
        geometry = self.geometry
        return {
            "schema": SCHEMA,
            "codebook": self.codebook,
            "layer": str(layer),
            "num_experts": str(geometry.num_experts),
            "hidden_size": str(geometry.hidden_size),
            "intermediate_size": str(geometry.intermediate_size),
            "slot_channels": str(geometry.slot_channels),
        }

    def tensor_names(self) -> set[str]:
        """The tensors of every layer file."""
        names = {"codes", "rotations", "gate_suh", "up_suh", "down_svh"}
        names |= {"rates_fc1", "rates_fc2"} if self.rates.pairs else set()
        return names | ({"sign_pattern"} if self.hadamard.intermediate_hadamard else set())

    def to_json(self) -> dict[str, Any]:
        """The JSON object, equal to the one that was parsed."""
        return emit_json(self)


class Manifest(ManifestHead):
    """A whole manifest.

    Attributes:
        layers: file and digest of each layer, by its index in decimal.
    """

    layers: dict[str, LayerEntry]

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        wanted = {str(index) for index in self.geometry.moe_layer_indices}
        extra, missing = sorted(set(self.layers) - wanted), sorted(wanted - set(self.layers))
        if extra or missing:
            raise refuse_key(
                "layers",
                f"must have exactly the decimal keys of moe_layer_indices; unexpected: {extra[:8]}, "
                f"missing: {missing[:8]}",
            )
        for key, entry in self.layers.items():
            name = layer_file_name(int(key))
            if entry.file != name:
                raise refuse_key(f"layers.{key}.file", f"must be {name!r}, got {entry.file[:80]!r}")
        return self

    def entry(self, layer: int) -> LayerEntry:
        """File and digest of a layer.

        Raises:
            KeyError: if the container does not have it.
        """
        return self.layers[str(layer)]

    @classmethod
    def of(cls, head: ManifestHead, entries: Mapping[int, LayerEntry]) -> Manifest:
        """A head with its layers.

        Raises:
            FormatValueError: if the entries are not exactly those of `moe_layer_indices`.
        """
        layers = {str(layer): entry.model_dump() for layer, entry in sorted(entries.items())}
        return parse_manifest({**head.to_json(), "layers": layers})


def layer_file_name(layer: int) -> str:
    """File name of a layer."""
    return f"exl3-layer-{layer:05d}.safetensors"


def parse_manifest(data: Any, *, file: str | os.PathLike[str] | None = None) -> Manifest:
    """Validate a parsed manifest.

    Raises:
        FormatTypeError: if a value has the wrong JSON type; names its path.
        FormatValueError: if a key is unknown or missing, or a value is wrong; names its path.
    """
    return parse_model(Manifest, data, file=file)


def read_manifest(directory: str | os.PathLike[str]) -> Manifest:
    """Read and validate the manifest of a container.

    Args:
        directory: the container.

    Raises:
        FormatNotFoundError: if there is no manifest.
        FormatTypeError, FormatValueError: as `parse_manifest`.
    """
    path = Path(directory) / MANIFEST_NAME
    return parse_manifest(read_json(path, max_bytes=MAX_MANIFEST_BYTES), file=path)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))
