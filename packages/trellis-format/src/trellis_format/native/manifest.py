"""Owns `trellis-manifest.json`: what a native checkpoint declares about its layer files.  It must not read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from trellis_format.activations import Activation
from trellis_format.errors import FormatError
from trellis_format.files.strict_json import read_json
from trellis_format.native.config import QuantizationConfig, TrellisConfig
from trellis_format.schema import StrictModel, emit_json, parse_model, refuse_key
from trellis_format.source import ExpertGeometry, Projection

__all__ = [
    "MANIFEST_NAME",
    "MAX_MANIFEST_BYTES",
    "SCHEMA",
    "NativeActivation",
    "NativeEntry",
    "NativeGeometry",
    "NativeHead",
    "NativeManifest",
    "layer_file_name",
    "parse_manifest",
    "read_manifest",
]

MANIFEST_NAME = "trellis-manifest.json"
"""Name of the manifest in its directory."""
SCHEMA = "trellis-native-v1"
"""Version of the layout of files."""
MAX_MANIFEST_BYTES = 64 << 20
"""Largest manifest that is read, in bytes."""

_Positive = Annotated[int, Field(gt=0)]
_LAX = Field(strict=False)  # a JSON array is a list and becomes a tuple; its elements stay strict
_Projections = Annotated[tuple[Literal["gate", "up", "down"], ...], _LAX]


class NativeGeometry(StrictModel):
    """Sizes of every layer; the rules are those of `ExpertGeometry`."""

    num_experts: _Positive
    hidden_size: _Positive
    intermediate_size: _Positive
    padded_hidden_size: _Positive
    padded_intermediate_size: _Positive
    projections: _Projections

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.geometry()
        except FormatError as error:
            raise refuse_key("projections" if "projections" in error.message else "sizes", error.message) from error
        return self

    def geometry(self) -> ExpertGeometry:
        """The same as an `ExpertGeometry`."""
        names = tuple(Projection(name) for name in self.projections)
        return ExpertGeometry(**self.model_dump(exclude={"projections"}), projections=names)

    @classmethod
    def of(cls, geometry: ExpertGeometry) -> NativeGeometry:
        """The JSON form of sizes."""
        sizes = {name: getattr(geometry, name) for name in cls.model_fields if name != "projections"}
        return cls(**sizes, projections=tuple(name.value for name in geometry.projections))


class NativeActivation(StrictModel):
    """The law between the GEMMs; a key that is left out has the value that `Activation` gives it."""

    kind: str
    limit: float | None = None
    alpha: float | None = None
    beta: float | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        try:
            self.activation()
        except FormatError as error:
            raise refuse_key("kind", error.message) from error
        return self

    def activation(self) -> Activation:
        """The same as an `Activation`."""
        return Activation(**self.model_dump(exclude_none=True))

    @classmethod
    def of(cls, activation: Activation) -> NativeActivation:
        """The JSON form of a law; an infinite limit has none and is left out."""
        plain = Activation(activation.kind)
        names = ("limit", "alpha", "beta")
        given = {name: value for name in names if (value := getattr(activation, name)) != getattr(plain, name)}
        return cls(kind=activation.kind, **given)


class NativeEntry(StrictModel):
    """A layer file, its digest, and what only this layer has.

    Attributes:
        file: its name.
        sha256: its digest, 64 hexadecimal digits.
        biased: the projections with a bias.
        up_divisor: the number by which up was divided; left out where it was not.
    """

    file: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")]
    biased: _Projections = ()
    up_divisor: Annotated[float, Field(gt=0)] | None = None


class NativeHead(StrictModel):
    """The manifest without its layers."""

    kind: Literal["trellis-manifest"]
    schema_name: Literal["trellis-native-v1"] = Field(alias="schema")
    quantization_config: QuantizationConfig
    geometry: NativeGeometry
    activation: NativeActivation | None = None

    @property
    def config(self) -> TrellisConfig:
        """The model's configuration."""
        return self.quantization_config.b12x_trellis

    def layer_metadata(self, layer: int) -> dict[str, str]:
        """What the metadata of a layer file states."""
        return {
            "schema": SCHEMA,
            "codebook": self.config.codebook,
            "layer": str(layer),
            "num_experts": str(self.geometry.num_experts),
            "hidden_size": str(self.geometry.hidden_size),
            "intermediate_size": str(self.geometry.intermediate_size),
        }

    def tensor_names(self, biased: tuple[str, ...]) -> set[str]:
        """The tensors of a layer file."""
        names = {"codes", "rate"} | {f"bias.{name}" for name in biased}
        for boundary, declared in self.config.scale:
            names |= {f"{boundary}.vectors"} | ({f"{boundary}.gains"} if declared.gains != "none" else set())
        return names | ({"expert_sign_patterns"} if self.config.transform.expert.kind != "none" else set())

    def to_json(self) -> dict[str, Any]:
        """The JSON object, equal to the one that was parsed."""
        return emit_json(self)


class NativeManifest(NativeHead):
    """A whole manifest.

    Attributes:
        layers: file and digest of each layer, by its index in decimal.
    """

    layers: dict[str, NativeEntry]

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        if not self.layers:
            raise refuse_key("layers", "must have at least one layer")
        for key, entry in self.layers.items():
            if not key.isascii() or not key.isdigit() or key != str(int(key[:9])):
                raise refuse_key(f"layers.{key[:80]}", "must be the index of a layer in decimal")
            if entry.file != layer_file_name(int(key)):
                raise refuse_key(
                    f"layers.{key}.file", f"must be {layer_file_name(int(key))!r}, got {entry.file[:80]!r}"
                )
            if entry.biased != tuple(name for name in self.geometry.projections if name in entry.biased):
                raise refuse_key(f"layers.{key}.biased", f"must be in order, of {list(self.geometry.projections)}")
        return self

    @property
    def indices(self) -> tuple[int, ...]:
        """Indices of the layers, ascending."""
        return tuple(sorted(map(int, self.layers)))

    @classmethod
    def of(cls, head: NativeHead, entries: Mapping[int, NativeEntry]) -> NativeManifest:
        """A head with its layers."""
        layers = {str(layer): emit_json(entry) for layer, entry in sorted(entries.items())}
        return parse_manifest({**head.to_json(), "layers": layers})


def layer_file_name(layer: int) -> str:
    """File name of a layer."""
    return f"trellis-layer-{layer:05d}.safetensors"


def parse_manifest(data: Any, *, file: str | os.PathLike[str] | None = None) -> NativeManifest:
    """Validate a parsed manifest.

    Raises:
        FormatTypeError: if a value has the wrong JSON type; names its path.
        FormatValueError: if a key is unknown or missing, or a value is wrong; names its path.
    """
    return parse_model(NativeManifest, data, file=file)


def read_manifest(directory: str | os.PathLike[str]) -> NativeManifest:
    """Read and validate the manifest of a native checkpoint.

    Args:
        directory: the checkpoint.

    Raises:
        FormatNotFoundError: if there is no manifest.
        FormatTypeError, FormatValueError: as `parse_manifest`.
    """
    path = Path(directory) / MANIFEST_NAME
    return parse_manifest(read_json(path, max_bytes=MAX_MANIFEST_BYTES), file=path)
