"""Owns the validation of a checkpoint: every rule, from headers first and from tensor data where asked.

It must not know how a report is shown.  What breaks a rule is a finding; only a path that holds no checkpoint at all is
an error.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, QUANTIZATION_CONFIG_NAME, Checkpoint, open_checkpoint
from trellis_format.detect import container_of
from trellis_format.errors import FormatArgumentError, FormatError
from trellis_format.exl3.adapter import layer_geometry
from trellis_format.exl3.layers import build_layer, find_layers, group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.exl3.names import DEFAULT_PATTERN, compile_pattern
from trellis_format.files.header import read_header
from trellis_format.files.strict_json import read_json
from trellis_format.findings import Findings
from trellis_format.inspect import inspect_checkpoint
from trellis_format.model_config import parse_model_config
from trellis_format.report import Finding, Severity
from trellis_format.validate_container import check_container
from trellis_format.validate_data import check_linears, data_bytes, true_outputs
from trellis_format.validate_report import Checked, ValidateReport, with_fix
from trellis_format.version import version

__all__ = ["validate_checkpoint"]

_Progress = Callable[[int, int], None]


def validate_checkpoint(
    path: str | os.PathLike[str],
    *,
    data: bool = False,
    pattern: str = DEFAULT_PATTERN,
    ignore_index: bool = False,
    ignore_method: bool = False,
    on_progress: _Progress | None = None,
) -> ValidateReport:
    """Hold a checkpoint of any container to every rule.

    Args:
        path: its directory.
        data: whether to read scales, biases and markers as well as headers, and of containers everything.
        pattern: regular expression of expert names in EXL3; see `trellis_format.exl3.names.DEFAULT_PATTERN`.
        ignore_index: do not compare EXL3 shards with the index.
        ignore_method: trust the tensors of EXL3 shards where a configuration states another `quant_method`.
        on_progress: told of the bytes that were read and of all bytes to read, again and again.

    Raises:
        FormatNotFoundError: if there is no such directory.
        FormatValueError: if it is no directory, holds no shard or two manifests, or the pattern is not usable.
    """
    compile_pattern(pattern)
    directory, container = Path(path), container_of(path)
    findings = Findings()
    if container != "exl3":
        checked = check_container(directory, container, findings, data=data, on_progress=on_progress)
        return _report(directory, checked, findings, container=container)
    if not any(name.name.endswith(".safetensors") and not name.name.startswith(".") for name in directory.iterdir()):
        raise FormatArgumentError("no *.safetensors file in the checkpoint directory", file=directory)
    try:
        report = inspect_checkpoint(directory, pattern=pattern, ignore_index=ignore_index, ignore_method=ignore_method)
    except FormatError as error:
        _explain(directory, error, findings)
        checked = Checked(shards=0, tensors=0, layers=0, data=False, bytes_read=0)
        return _report(directory, checked, findings)
    read = 0
    if data:
        with _open(directory, ignore_index) as checkpoint:
            _check_data(checkpoint, pattern, findings, on_progress)
            read = checkpoint.bytes_read
    checked = Checked(
        shards=len(report.shards),
        tensors=sum(shard.tensors for shard in report.shards),
        layers=len(report.layers),
        data=data,
        bytes_read=read,
    )
    return _report(directory, checked, findings, *report.findings)


def _report(
    directory: Path, checked: Checked, findings: Findings, *others: Finding, container: str = "exl3"
) -> ValidateReport:
    order = list(Severity)
    every = sorted((*others, *findings.collected()), key=lambda finding: order.index(finding.severity))
    return ValidateReport(
        tool_version=version(),
        path=str(directory),
        container=container,
        checked=checked,
        findings=tuple(map(with_fix, every)),
    )


def _explain(directory: Path, error: FormatError, findings: Findings) -> None:
    """Find every file that keeps the checkpoint from being opened, not only the first."""
    for shard in sorted(directory.glob("[!.]*.safetensors")):
        try:
            read_header(shard)
        except FormatError as broken:
            findings.error("broken-shard", broken)
    for name in (INDEX_NAME, CONFIG_NAME, QUANTIZATION_CONFIG_NAME):
        try:
            if os.path.lexists(directory / name):
                read_json(directory / name)
        except FormatError as broken:
            findings.error("json-invalid", broken)
    if not findings.collected():
        findings.error("broken-checkpoint", error)


def _open(directory: Path, ignore_index: bool) -> Checkpoint:
    """As the inspection opened it: an index that is wrong is a finding already."""
    if not ignore_index:
        with contextlib.suppress(FormatError):
            return open_checkpoint(directory)
    return open_checkpoint(directory, ignore_index=True)


def _check_data(checkpoint: Checkpoint, pattern: str, findings: Findings, on_progress: _Progress | None) -> None:
    linears = _sound_linears(checkpoint)
    total, done = data_bytes(linears.values()), 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if on_progress is not None:
            on_progress(done, total)

    check_linears(linears.values(), _true_outputs(checkpoint, pattern, linears), findings, on_bytes=advance)


def _sound_linears(checkpoint: Checkpoint) -> dict[str, Exl3Linear]:
    linears = {}
    for name, tensors in group_modules(checkpoint.tensors).linears.items():
        with contextlib.suppress(FormatError):  # what is wrong with its header is a finding already
            linears[name] = describe_linear(name, tensors)
    return linears


def _true_outputs(checkpoint: Checkpoint, pattern: str, linears: dict[str, Exl3Linear]) -> dict[str, int]:
    outputs: dict[str, int] = {}
    with contextlib.suppress(FormatError):  # of the configuration or of names, findings already
        config = parse_model_config(checkpoint.config, file=str(checkpoint.path / CONFIG_NAME))
        for key, names in find_layers(checkpoint, pattern=pattern).items():
            with contextlib.suppress(FormatError, KeyError):  # of a layer that is a finding already
                layer = build_layer(checkpoint.path, key, names, {name: linears[name] for name in names}, config)
                geometry = layer_geometry(layer)
                outputs |= {name: true_outputs(geometry, says.projection) for name, says in names.items()}
    return outputs
