"""Owns the files of receipts: reading, writing in one fixed form, and what may lie in the documentation.

It must not know tables or plots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.packing import pack, unpack
from trellis_moe.receipts.schema import Receipt

__all__ = ["Published", "dump", "gpu_folder", "load", "load_published", "publish", "write"]

_PACKED: dict[str, tuple[str, ...]] = {  # lists that a file holds as tables, which take a third of the bytes, by what
    "ceilings": (),
    "rows": ("case.geometry", "case.codebook", "case.k"),
}


@dataclass(frozen=True)
class Published:
    """A receipt of the documentation.

    Attributes:
        gpu: folder of its GPU.
        name: of its file, without the suffix.
        receipt: what it says.
    """

    gpu: str
    name: str
    receipt: Receipt


def dump(receipt: Receipt) -> str:
    """The text of a receipt's file; equal receipts give equal texts.

    It is the JSON of the schema, with ceilings and rows packed as tables, a line for each row.
    """
    content = receipt.model_dump(mode="json", by_alias=True, exclude_none=True)
    parts = [f"{json.dumps(key)}: {_value(key, value)}" for key, value in content.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(key: str, value: Any) -> str:
    if key not in _PACKED:
        return json.dumps(value)
    return "[\n" + ",\n".join(map(_table, pack(value, _PACKED[key]))) + "\n]"


def _table(table: dict[str, Any]) -> str:
    groups = ",\n".join(map(_table, table.get("groups", ())))
    rows = ",\n".join(json.dumps(row, separators=(",", ":")) for row in table.get("rows", ()))
    head = json.dumps({key: value for key, value in table.items() if key not in ("groups", "rows")})[:-1]
    return f'{head}, "groups": [\n{groups}\n]}}' if groups else f'{head}, "rows": [\n{rows}\n]}}'


def load(path: Path) -> Receipt:
    """Read a receipt, whose ceilings and rows may be packed as tables or not.

    Args:
        path: its file.

    Raises:
        MoeValueError: if it is not there, or not a receipt; names the field and the rule.
    """
    try:
        content = json.loads(path.read_bytes())
        for key in _PACKED:
            if all("columns" in each for each in content[key]):
                content[key] = unpack(content[key])
    except OSError as error:
        raise MoeValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MoeValueError(f"{path}: is no receipt: {type(error).__name__}: {error}") from error
    try:
        return Receipt.model_validate_json(json.dumps(content))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "receipt"
        raise MoeValueError(f"{path}: {where}: {first['msg']} ({error.error_count()} problems)") from error


def write(receipt: Receipt, path: Path) -> None:
    """Write a receipt, making its folder.

    Raises:
        MoeValueError: if the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump(receipt))
    except OSError as error:
        raise MoeValueError(f"{path}: cannot be written: {error.strerror or error}") from error


def gpu_folder(name: str) -> str:
    """The folder of a GPU's receipts: its name in lower-case words joined by hyphens."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def publish(receipts: Iterable[tuple[str, Receipt]], benchmarks: Path) -> list[Path]:
    """Put receipts into the documentation.

    Args:
        receipts: (name of the file, receipt).
        benchmarks: the folder `docs/benchmarks`.

    Returns:
        The files, one for each receipt.

    Raises:
        MoeValueError: if a receipt is a rehearsal on a CPU, or of sources that differed from their commit.
    """
    paths = []
    for name, receipt in receipts:
        _check_publishable(name, receipt)
        paths.append(benchmarks / gpu_folder(receipt.machine.name) / f"{name}.json")
        write(receipt, paths[-1])
    return paths


def load_published(benchmarks: Path) -> tuple[Published, ...]:
    """The receipts of the documentation, by GPU and name.

    Args:
        benchmarks: the folder `docs/benchmarks`.

    Raises:
        MoeValueError: if a file is not a receipt, may not be there, or lies in the folder of another GPU.
    """
    found = []
    for path in sorted(benchmarks.glob("*/*.json")):
        if path.parent.name == "peer":
            continue
        receipt = load(path)
        _check_publishable(str(path), receipt)
        if path.parent.name != gpu_folder(receipt.machine.name):
            raise MoeValueError(
                f"{path}: is of {receipt.machine.name}, whose folder is {gpu_folder(receipt.machine.name)}"
            )
        found.append(Published(path.parent.name, path.stem, receipt))
    return tuple(found)


def _check_publishable(name: str, receipt: Receipt) -> None:
    if receipt.machine.kind != "cuda":
        raise MoeValueError(f"{name}: is a rehearsal on a CPU; the documentation takes receipts of GPUs alone")
    if receipt.dirty:
        raise MoeValueError(f"{name}: its sources differed from commit {receipt.commit}; measure a commit as it is")
