"""Owns the inspection of a checkpoint: what it holds and what breaks a rule, from headers and configurations alone.

It must not read tensor data, nor know how a report is shown.  What breaks a rule becomes a finding, so that one broken
linear does not hide the others; only a checkpoint that cannot be opened is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from trellis_format.detect import container_of
from trellis_format.errors import FormatError, FormatUnsupportedError, FormatValueError
from trellis_format.exl3.adapter import layer_geometry, single_codebook
from trellis_format.exl3.declared import DeclaredQuantization, read_declared
from trellis_format.exl3.layers import Exl3Layer, LayerKey, build_layer, example_trellis
from trellis_format.exl3.linear import Exl3Linear
from trellis_format.exl3.names import DEFAULT_PATTERN, ExpertName, compile_pattern
from trellis_format.files.collector import paused_collector
from trellis_format.findings import Findings
from trellis_format.inspect_container import ContainerPart, inspect_layers
from trellis_format.inspect_model import compare_sizes, read_model, summarise_model
from trellis_format.inspect_modules import Survey, sort_modules
from trellis_format.layer_files import LayerFiles, open_layer_files
from trellis_format.model_config import ModelConfig
from trellis_format.report import BitsByClass, InspectReport, LayerSummary, ShardSummary, StatedValue
from trellis_format.summaries import (
    add_bits,
    bits_by_class,
    bits_per_weight,
    summarise_projections,
    summarise_transforms,
    tensor_parallel,
)
from trellis_format.survey import TensorClass, count_bytes, group_skipped
from trellis_format.version import version

__all__ = ["inspect_checkpoint"]

_NO_EXPERTS = "no EXL3 linear has a name that the pattern of expert names matches"


@paused_collector()
def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    pattern: str = DEFAULT_PATTERN,
    ignore_index: bool = False,
    ignore_method: bool = False,
) -> InspectReport:
    """Report what a checkpoint of any container holds, from headers and configurations alone.

    Of a native container the rate bytes of each layer are read too, since they are its table of K.

    Args:
        path: its directory.
        pattern: regular expression of expert names; see `trellis_format.exl3.names.DEFAULT_PATTERN`.
        ignore_index: do not compare EXL3 shards with the index.
        ignore_method: trust the tensors where a configuration states another `quant_method`.

    Raises:
        FormatNotFoundError: if there is no such directory.
        FormatTypeError, FormatValueError: if it cannot be opened, or the pattern is not usable.
    """
    compiled = compile_pattern(pattern)
    findings = Findings()
    container = container_of(path)
    files = None if container == "exl3" else open_layer_files(path, container)
    with _open(path, ignore_index, findings) if files is None else _open_beside(files) as checkpoint:
        survey = Survey()
        file = checkpoint.path / CONFIG_NAME
        config = read_model(checkpoint.config, file, findings)
        survey.refused = config is None
        declared = _declared(checkpoint, survey, findings)
        if declared is not None and files is None:
            _compare_method(checkpoint, declared, survey, findings, ignore_method=ignore_method)
        declared = declared or DeclaredQuantization()
        sort_modules(checkpoint, compiled, declared, survey, findings)
        config = config or ModelConfig()
        part = ContainerPart() if files is None else inspect_layers(files, config, survey.refused, findings)
        if not survey.experts and files is None:
            findings.warning("no-experts", _NO_EXPERTS, file=checkpoint.path)
        layers = [_layer(checkpoint.path, key, survey, config, findings) for key in sorted(survey.experts)]
        if files is None:
            _compare_storage(checkpoint, declared, survey, findings)
        _compare_head(declared, survey, findings)
        bits = bits_by_class(survey.linears, survey.kinds)
        gates = {name.projection for names in survey.experts.values() for name in names.values()}
        return InspectReport(
            tool_version=version(),
            path=str(checkpoint.path),
            container=container,
            shards=(*part.shards, *_shards(checkpoint)),
            model=summarise_model(config, file, gates | part.projections, findings, stated=part.activation),
            stated=(*part.stated, *_stated(declared)),
            layers=(*part.layers, *layers),
            bits_per_weight=_bits(bits, part),
            bytes=count_bytes([*survey.sizes, *((TensorClass.EXPERTS, layer.bytes) for layer in part.layers)]),
            transforms=part.transforms(summarise_transforms(survey.linears.values())),
            skipped=group_skipped(survey.skipped),
            findings=findings.collected(),
        )


def _open(path: str | os.PathLike[str], ignore_index: bool, findings: Findings) -> Checkpoint:
    if ignore_index:
        checkpoint = open_checkpoint(path, ignore_index=True)
        if (checkpoint.path / INDEX_NAME).exists():
            text = "the index was not compared with the shards, as asked"
            findings.note("index-ignored", text, file=checkpoint.path / INDEX_NAME)
        return checkpoint
    try:
        checkpoint = open_checkpoint(path)
    except FormatError as error:
        if error.file is None or Path(error.file).name != INDEX_NAME:
            raise
        checkpoint = open_checkpoint(path, ignore_index=True)
        findings.error("index-mismatch", error)
    for note in checkpoint.notes:
        findings.note("shard-not-read", note, file=checkpoint.path)
    return checkpoint


def _bits(beside: BitsByClass, part: ContainerPart) -> BitsByClass:
    own = [layer.bits for layer in part.layers]
    changes = {"model": add_bits(beside.model, *own), "experts": add_bits(beside.experts, *own)}
    return beside.model_copy(update=changes)


def _stated(declared: DeclaredQuantization) -> list[StatedValue]:
    return [StatedValue(file=it.file, field=it.field, value=it.value) for it in declared.statements]


def _open_beside(files: LayerFiles) -> Checkpoint:
    """What lies beside the layer files of a container, which has no index."""
    return open_checkpoint(files.path, ignore_index=True, but=set(files.names.values()))


def _declared(checkpoint: Checkpoint, survey: Survey, findings: Findings) -> DeclaredQuantization | None:
    try:
        return read_declared(checkpoint)
    except FormatError as error:
        survey.refused = True
        findings.error("config-invalid", error)
        return None


def _compare_method(
    checkpoint: Checkpoint,
    declared: DeclaredQuantization,
    survey: Survey,
    findings: Findings,
    *,
    ignore_method: bool,
) -> None:
    try:
        declared.check_method(example_trellis(checkpoint.tensors))
    except FormatError as error:
        if ignore_method:
            text = f"{error.message}; the tensors are trusted, as asked"
            findings.note("method-ignored", text, file=error.file, tensor=error.tensor)
        else:
            survey.refused = True
            findings.error("method-conflict", error)
    if declared.storage_file is None:
        text = "no tensor_storage: rates cannot be compared with what the converter noted"
        findings.note("storage-missing", text, file=checkpoint.path)


def _layer(path: Path, key: LayerKey, survey: Survey, config: ModelConfig, findings: Findings) -> LayerSummary:
    names = survey.experts[key]
    linears = {module: survey.linears[module] for module in names if module in survey.linears}
    layer = _sound_layer(path, key, names, linears, config, findings)
    geometry = None if layer is None else layer_geometry(layer)
    if geometry is not None:
        compare_sizes(path / CONFIG_NAME, key.index, key.prefix, geometry, config, findings)
    divisor = config.up_divisor(key.index)
    if divisor != 1.0:
        text = f"this architecture divides up by {divisor:g} before quantisation; route weights are multiplied by it"
        findings.note("up-divisor", f"layer {key.index}: {text}", tensor=key.prefix)
    return LayerSummary(
        index=key.index,
        prefix=key.prefix,
        auxiliary=key.auxiliary,
        readable=layer is not None and survey.contradicted.isdisjoint(names) and not survey.refused,
        experts=len({name.expert for name in names.values()}),
        hidden_size=None if geometry is None else geometry.hidden_size,
        padded_hidden_size=None if geometry is None else geometry.padded_hidden_size,
        intermediate_size=None if geometry is None else geometry.intermediate_size,
        padded_intermediate_size=None if geometry is None else geometry.padded_intermediate_size,
        projections=summarise_projections(names, linears),
        bits=bits_per_weight(linears.values()),
        bytes=sum(linear.nbytes for linear in linears.values()),
        up_divisor=divisor,
        tensor_parallel=None if geometry is None else tensor_parallel(geometry.padded_intermediate_size),
    )


def _sound_layer(
    path: Path,
    key: LayerKey,
    names: Mapping[str, ExpertName],
    linears: Mapping[str, Exl3Linear],
    config: ModelConfig,
    findings: Findings,
) -> Exl3Layer | None:
    if len(linears) < len(names):  # the broken ones are findings already
        return None
    try:
        layer = build_layer(path, key, names, linears, config)
        single_codebook(layer)
    except FormatError as error:
        findings.error("mixed-codebooks" if isinstance(error, FormatUnsupportedError) else "broken-layer", error)
        return None
    return layer


def _compare_storage(
    checkpoint: Checkpoint, declared: DeclaredQuantization, survey: Survey, findings: Findings
) -> None:
    if declared.storage_file is None:
        return
    silent = [name for name in survey.linears if not _has(declared.storage.get(name), "bits_per_weight")]
    if silent:
        text = f"tensor_storage has no bits_per_weight for {len(silent)} linears, first {silent[0]}"
        findings.note("storage-silent", text, file=declared.storage_file)
    for module, entry in declared.storage.items():
        where = f"tensor_storage[{module!r}]"
        stored = entry.get("stored_tensors") if isinstance(entry, dict) else entry
        if stored is None and entry is not None:  # a module may have none
            continue
        if not isinstance(stored, dict):
            what = f"{where}.stored_tensors" if isinstance(entry, dict) else where
            text = f"{what} must be an object, got {type(stored).__name__}"
            findings.error("storage-invalid", FormatValueError(text, file=declared.storage_file))
            continue
        for name, says in stored.items():
            if not isinstance(says, dict) or not isinstance(says.get("shape"), list | None):
                text = f"{where} has no object with a list shape for it, got {says!r}"
                findings.error("storage-invalid", FormatValueError(text, file=declared.storage_file, tensor=name))
                continue
            tensor = checkpoint.tensors.get(name)
            if tensor is None:
                text = f"{where} lists it, no shard holds it"
                findings.warning("storage-absent", text, file=declared.storage_file, tensor=name)
            elif _has(says, "shape") and says["shape"] != list(tensor.shape):
                text = f"{where} says shape {says['shape']}, the shard {list(tensor.shape)}"
                findings.warning("storage-shape", text, file=declared.storage_file, tensor=name)


def _has(entry: object, key: str) -> bool:
    return isinstance(entry, dict) and entry.get(key) is not None


def _compare_head(declared: DeclaredQuantization, survey: Survey, findings: Findings) -> None:
    for name, linear in survey.linears.items():
        if survey.kinds[name] is not TensorClass.HEAD:
            continue
        for stated in declared.of("head_bits"):
            if stated.value not in (str(linear.rate), str(linear.rate.bits)):
                findings.warning(
                    "head-bits", f"{stated}, the head has K = {linear.rate}", file=linear.file, tensor=name
                )


def _shards(checkpoint: Checkpoint) -> tuple[ShardSummary, ...]:
    headers = [reader.header for reader in checkpoint.readers]
    return tuple(
        ShardSummary(
            name=header.path.name,
            bytes=sum(entry.nbytes for entry in header.entries.values()),
            tensors=len(header.entries),
        )
        for header in headers
    )
