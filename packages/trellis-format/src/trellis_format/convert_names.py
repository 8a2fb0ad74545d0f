"""Owns the names that a converted checkpoint's experts had, kept in a file beside the container.

It must not know tensors.  Containers number experts and projections; without their names a way back must guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from trellis_format.errors import FormatValueError
from trellis_format.exl3.names import ExpertName
from trellis_format.files.strict_json import read_json
from trellis_format.source import Projection
from trellis_format.synth_names import NAMINGS

__all__ = ["NAMES_FILE", "LayerNames", "default_names", "dump_names", "names_of", "read_names"]

NAMES_FILE = "trellis-names.json"
"""File with the names, beside the files of a container."""
_SCHEMA: Final = "trellis-format/names"
_DEFAULT_NAMING = NAMINGS["qwen3"]


class LayerNames(BaseModel):
    """The names of one layer's experts: linears are called `<prefix>.<expert>.<word>`.

    Attributes:
        prefix: path of the experts.
        words: name of each projection.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: StrictStr = Field(max_length=1024)
    words: dict[Projection, StrictStr]

    def module(self, expert: int, projection: Projection) -> str:
        """Module name of one expert's linear.

        Raises:
            FormatValueError: if the projection has no name.
        """
        if projection not in self.words:
            raise FormatValueError(f"experts under {self.prefix[:200]!r} have no name for {projection}")
        return f"{self.prefix}.{expert}.{self.words[projection]}"


class _NamesFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    schema_name: Literal["trellis-format/names"] = Field(default=_SCHEMA, alias="schema")
    schema_version: Literal[1] = 1
    layers: dict[int, LayerNames]


def names_of(modules: Mapping[str, ExpertName]) -> LayerNames:
    """The names of one layer, from its module names.

    Raises:
        FormatValueError: if they are not `<prefix>.<expert>.<word>` with one word for each projection.
    """
    prefix = next(iter(modules.values())).prefix
    words = {says.projection: name.rpartition(".")[2] for name, says in modules.items()}
    names = LayerNames(prefix=prefix, words={key: words[key] for key in Projection if key in words})
    for name, says in modules.items():
        if name != names.module(says.expert, says.projection):
            raise FormatValueError(
                f"named other than {names.module(says.expert, says.projection)!r}; names of a converted layer must be "
                "<prefix>.<expert>.<word>",
                tensor=name,
            )
    return names


def default_names(layer: int) -> LayerNames:
    """The names that experts get where none are known, those of Qwen3-MoE."""
    return LayerNames(prefix=f"{_DEFAULT_NAMING.block_path(layer)}.experts", words=dict(_DEFAULT_NAMING.words))


def dump_names(layers: Mapping[int, LayerNames]) -> dict[str, object]:
    """The JSON object of the file of names."""
    return _NamesFile(layers=dict(layers)).model_dump(mode="json", by_alias=True)


def read_names(directory: Path) -> dict[int, LayerNames]:
    """The names in a directory, empty where it has no file of them.

    Raises:
        FormatValueError: if the file breaks a rule.
    """
    path = directory / NAMES_FILE
    if not path.exists():
        return {}
    try:
        return _NamesFile.model_validate_json(json.dumps(read_json(path))).layers
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise FormatValueError(f"{key}: {first['msg']}", file=path) from error
