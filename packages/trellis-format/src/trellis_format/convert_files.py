"""Owns what a conversion does with the files beside tensors: what they state about quantisation follows the container.

It must not know tensors.  Statements about EXL3 linears would be untrue beside another container, so that its
`config.json` states that container or nothing; the files of an EXL3 checkpoint are kept under names of their own, from
which the way back restores them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trellis_format.checkpoint import CONFIG_NAME, QUANTIZATION_CONFIG_NAME
from trellis_format.files.strict_json import read_json

__all__ = ["KEPT_NAMES", "carried_files"]

KEPT_NAMES = {name: f"trellis-exl3-{name}" for name in (CONFIG_NAME, QUANTIZATION_CONFIG_NAME)}
"""Name under which each configuration file of an EXL3 checkpoint is kept beside a container."""
_STATED = "quantization_config"


def carried_files(
    files: Iterable[Path],
    container: str,
    target: str,
    stated: Mapping[str, Any] | None,
    left_out: Iterable[str] = (),
) -> dict[str, Path | bytes]:
    """The files beside tensors of a converted checkpoint by name: what to copy, or what to write.

    Args:
        files: those of the checkpoint that is read.
        container: name of its container.
        target: name of the container that is written.
        stated: what `config.json` states as `quantization_config` in the target; None where it states nothing.
        left_out: paths of experts that are not carried, whose modules `quantization_config.json` then lacks.

    Raises:
        FormatValueError: if a configuration file is no JSON.
    """
    found = {path.name: path for path in files}
    carried: dict[str, Path | bytes] = dict(found)
    modules = QUANTIZATION_CONFIG_NAME if container == "exl3" else KEPT_NAMES[QUANTIZATION_CONFIG_NAME]
    prefixes = tuple(f"{path}." for path in left_out)
    if prefixes and modules in found:
        carried[modules] = _dumped(_without_modules(read_json(found[modules]), prefixes))
    if target == "exl3":
        if container != "exl3":
            _restore(found, carried)
        return carried
    if container == "exl3":
        for name, kept in KEPT_NAMES.items():
            if name in carried:
                carried[kept] = carried[name]
        carried.pop(QUANTIZATION_CONFIG_NAME, None)
    if CONFIG_NAME in found:
        config = read_json(found[CONFIG_NAME])
        if isinstance(config, dict) and (stated is not None or _states(config)):
            carried[CONFIG_NAME] = _dumped(_silent(config) | ({} if stated is None else {_STATED: dict(stated)}))
    return carried


def _restore(found: Mapping[str, Path], carried: dict[str, Path | bytes]) -> None:
    """Give the kept files their names again; a configuration that was edited since is kept, with what it stated."""
    modules, kept = KEPT_NAMES[QUANTIZATION_CONFIG_NAME], carried.pop(KEPT_NAMES[CONFIG_NAME], None)
    if modules in carried:
        carried[QUANTIZATION_CONFIG_NAME] = carried.pop(modules)
    config = read_json(found[CONFIG_NAME]) if CONFIG_NAME in found else None
    if not isinstance(config, dict):
        return
    original = {} if kept is None else read_json(found[KEPT_NAMES[CONFIG_NAME]])
    if kept is not None and isinstance(original, dict) and _silent(config) == _silent(original):
        carried[CONFIG_NAME] = kept
    elif _states(config) or _states(original):
        stated = {_STATED: original[_STATED]} if isinstance(original, dict) and _STATED in original else {}
        carried[CONFIG_NAME] = _dumped(_silent(config) | stated)


def _states(config: Any) -> bool:
    """Whether a configuration states a quantisation, of its own or of its text model."""
    return isinstance(config, dict) and (_STATED in config or _states(config.get("text_config")))


def _silent(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what it states about quantisation."""
    silent = {key: value for key, value in config.items() if key != _STATED}
    if _states(silent.get("text_config")):
        silent["text_config"] = _silent(silent["text_config"])
    return silent


def _without_modules(stated: Any, prefixes: tuple[str, ...]) -> Any:
    storage = stated.get("tensor_storage") if isinstance(stated, dict) else None
    if not isinstance(storage, dict):
        return stated
    return {**stated, "tensor_storage": {name: it for name, it in storage.items() if not name.startswith(prefixes)}}


def _dumped(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
