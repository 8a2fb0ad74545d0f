"""Owns the inspection of a checkpoint: what it holds and what breaks a rule, from headers and configurations alone.

It must not read tensor data, nor know how a report is shown.  What breaks a rule becomes a finding, so that one broken
linear does not hide the others; only a checkpoint that cannot be opened is an error.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trellis_format.activations import Activation
from trellis_format.checkpoint import CONFIG_NAME, INDEX_NAME, Checkpoint, open_checkpoint
from trellis_format.errors import FormatError, FormatUnsupportedError
from trellis_format.exl3.adapter import layer_geometry, single_codebook
from trellis_format.exl3.declared import DeclaredQuantization, read_declared
from trellis_format.exl3.layers import Exl3Layer, LayerKey, build_layer, example_trellis, group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.exl3.names import DEFAULT_PATTERN, ExpertName, compile_pattern, match_expert
from trellis_format.extent import BLOCK
from trellis_format.files.arrays import FileArray
from trellis_format.files.collector import paused_collector
from trellis_format.findings import Findings
from trellis_format.model_config import ModelConfig, parse_model_config
from trellis_format.report import (
    ActivationSummary,
    InspectReport,
    LayerSummary,
    ModelSummary,
    ShardSummary,
    StatedValue,
)
from trellis_format.source import ExpertGeometry, Projection
from trellis_format.summaries import (
    bits_by_class,
    bits_per_weight,
    summarise_projections,
    summarise_transforms,
    tensor_parallel,
)
from trellis_format.survey import (
    SkipReason,
    TensorClass,
    class_of,
    count_bytes,
    flat_trellis_reason,
    group_skipped,
    skip_reason,
)
from trellis_format.version import version

__all__ = ["inspect_checkpoint"]


@dataclass
class _Survey:
    """The modules of a checkpoint: sound linears, names of experts by layer, what was skipped, bytes and classes.

    `contradicted` holds linears that a configuration contradicts; `refused` is set when no layer can be read at all.
    """

    linears: dict[str, Exl3Linear] = field(default_factory=dict)
    experts: dict[LayerKey, dict[str, ExpertName]] = field(default_factory=dict)
    skipped: dict[str, tuple[SkipReason, FileArray]] = field(default_factory=dict)
    sizes: list[tuple[TensorClass, int]] = field(default_factory=list)
    kinds: dict[str, TensorClass] = field(default_factory=dict)
    contradicted: set[str] = field(default_factory=set)
    refused: bool = False

    def skip(self, module: str, tensors: Iterable[FileArray], reason: SkipReason) -> None:
        """Set tensors of a module aside."""
        kind = class_of(module, expert=False, linear=False)
        for tensor in tensors:
            self.skipped[tensor.entry.name] = (reason, tensor)
            self.sizes.append((kind, tensor.nbytes))


@paused_collector()
def inspect_checkpoint(
    path: str | os.PathLike[str], *, pattern: str = DEFAULT_PATTERN, ignore_index: bool = False
) -> InspectReport:
    """Report what a checkpoint holds, from headers and configurations alone.

    Args:
        path: a directory of safetensors shards.
        pattern: regular expression of expert names; see `trellis_format.exl3.names.DEFAULT_PATTERN`.
        ignore_index: do not compare the shards with the index.

    Raises:
        FormatNotFoundError: if there is no such directory.
        FormatValueError: if it cannot be opened, or the pattern is not usable.
    """
    compiled = compile_pattern(pattern)
    findings = Findings()
    with _open(path, ignore_index, findings) as checkpoint:
        survey = _Survey()
        config = _config(checkpoint, survey, findings)
        declared = _declared(checkpoint, survey, findings)
        _sort_modules(checkpoint, compiled, declared, survey, findings)
        layers = tuple(_layer(checkpoint.path, key, survey, config, findings) for key in sorted(survey.experts))
        _compare_storage(checkpoint, declared, survey, findings)
        _compare_head(declared, survey, findings)
        return InspectReport(
            tool_version=version(),
            path=str(checkpoint.path),
            shards=_shards(checkpoint),
            model=_model(config, checkpoint.path / CONFIG_NAME, survey, findings),
            stated=tuple(StatedValue(file=it.file, field=it.field, value=it.value) for it in declared.statements),
            layers=layers,
            bits_per_weight=bits_by_class(survey.linears, survey.kinds),
            bytes=count_bytes(survey.sizes),
            transforms=summarise_transforms(survey.linears.values()),
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


def _config(checkpoint: Checkpoint, survey: _Survey, findings: Findings) -> ModelConfig:
    file = checkpoint.path / CONFIG_NAME
    if checkpoint.config is None:
        findings.warning("config-missing", "no configuration: sizes are taken as stored", file=file)
    try:
        return parse_model_config(checkpoint.config, file=str(file))
    except FormatError as error:
        survey.refused = True
        findings.error("config-invalid", error)
        return ModelConfig()


def _declared(checkpoint: Checkpoint, survey: _Survey, findings: Findings) -> DeclaredQuantization:
    try:
        declared = read_declared(checkpoint)
    except FormatError as error:
        survey.refused = True
        findings.error("config-invalid", error)
        return DeclaredQuantization()
    try:
        declared.check_method(example_trellis(checkpoint.tensors))
    except FormatError as error:
        survey.refused = True
        findings.error("method-conflict", error)
    if declared.storage_file is None:
        text = "no tensor_storage: rates cannot be compared with what the converter noted"
        findings.note("storage-missing", text, file=checkpoint.path)
    return declared


def _sort_modules(
    checkpoint: Checkpoint,
    pattern: re.Pattern[str],
    declared: DeclaredQuantization,
    survey: _Survey,
    findings: Findings,
) -> None:
    modules = group_modules(checkpoint.tensors)
    for name, tensors in modules.linears.items():
        trellis = tensors["trellis"]
        try:
            expert = match_expert(name, pattern)
        except FormatUnsupportedError as error:
            findings.error("rank-sliced", FormatUnsupportedError(error.message, file=trellis.file, tensor=name))
            survey.skip(name, tensors.values(), SkipReason.RANK_SLICED)
            survey.refused = True
            continue
        flat = flat_trellis_reason(trellis.shape, signs=f"{name}.signs" in checkpoint.tensors)
        if flat is not None and expert is None:
            survey.skip(name, tensors.values(), flat)
            continue
        survey.kinds[name] = class_of(name, expert=expert is not None, linear=True)
        survey.sizes += ((survey.kinds[name], tensor.nbytes) for tensor in tensors.values())
        if expert is not None:
            survey.experts.setdefault(LayerKey(expert.layer, expert.prefix), {})[name] = expert
        _describe(survey, name, tensors, declared, findings)
    _survey_others(survey, modules.others, findings)
    if not survey.experts:
        text = "no EXL3 linear has a name that the pattern of expert names matches"
        findings.warning("no-experts", text, file=checkpoint.path)


def _describe(
    survey: _Survey, name: str, tensors: Mapping[str, FileArray], declared: DeclaredQuantization, findings: Findings
) -> None:
    try:
        linear = describe_linear(name, tensors)
    except FormatError as error:
        findings.error("broken-linear", error)
        return
    survey.linears[name] = linear
    try:
        declared.check_linear(linear)
    except FormatError as error:
        survey.contradicted.add(name)
        findings.error("stated-otherwise", error)
    if "scale" in tensors:
        survey.skipped[f"{name}.scale"] = (SkipReason.LEGACY_SCALE, tensors["scale"])
        text = "scale of files before the first release is ignored"
        findings.note("legacy-scale", text, file=tensors["scale"].file, tensor=f"{name}.scale")


def _survey_others(survey: _Survey, others: Mapping[str, FileArray], findings: Findings) -> None:
    for name, tensor in others.items():
        module = name.rpartition(".")[0]
        beside = survey.skipped.get(f"{module}.trellis")
        if beside is not None:  # signs of a quantised embedding
            survey.skip(module, [tensor], beside[0])
            continue
        kind = class_of(module, expert=False, linear=False)
        reason = skip_reason(name, kind)
        survey.skip(module, [tensor], reason)
        if reason is SkipReason.ORPHAN:
            findings.warning("orphan-tensor", reason.explanation, file=tensor.file, tensor=name)
        elif reason is SkipReason.UNQUANTISED_EXPERT:
            findings.warning("unquantised-expert", reason.explanation, file=tensor.file, tensor=name)


def _layer(path: Path, key: LayerKey, survey: _Survey, config: ModelConfig, findings: Findings) -> LayerSummary:
    names = survey.experts[key]
    linears = {module: survey.linears[module] for module in names if module in survey.linears}
    layer = _sound_layer(path, key, names, linears, config, findings)
    geometry = None if layer is None else layer_geometry(layer)
    if geometry is not None:
        _compare_sizes(path / CONFIG_NAME, key, geometry, config, findings)
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


def _compare_sizes(
    file: Path, key: LayerKey, geometry: ExpertGeometry, config: ModelConfig, findings: Findings
) -> None:
    for axis, stored, candidates in (
        ("hidden", geometry.padded_hidden_size, config.hidden_sizes()),
        ("intermediate", geometry.padded_intermediate_size, config.expert_widths()),
    ):
        if candidates and stored not in {-(-width // BLOCK) * BLOCK for width in candidates.values()}:
            stated = ", ".join(f"{name} = {width}" for name, width in candidates.items())
            findings.warning(
                f"{axis}-size",
                f"layer {key.index}: {file.name} says {stated}, the tensors have {stored} {axis} channels, padding to "
                f"{BLOCK} included; the tensors are taken",
                file=file,
                tensor=key.prefix,
            )
    declared = config.expert_count()
    if declared is not None and declared < geometry.num_experts:
        text = f"layer {key.index}: {file.name} says {declared} experts, the tensors have {geometry.num_experts}"
        findings.warning("expert-count", f"{text}; the tensors are taken", file=file, tensor=key.prefix)


def _compare_storage(
    checkpoint: Checkpoint, declared: DeclaredQuantization, survey: _Survey, findings: Findings
) -> None:
    if declared.storage_file is None:
        return
    silent = [name for name in survey.linears if not _has(declared.storage.get(name), "bits_per_weight")]
    if silent:
        text = f"tensor_storage has no bits_per_weight for {len(silent)} linears, first {silent[0]}"
        findings.note("storage-silent", text, file=declared.storage_file)
    for module, entry in declared.storage.items():
        stored = entry.get("stored_tensors") if isinstance(entry, dict) else None
        for name, says in stored.items() if isinstance(stored, dict) else ():
            tensor = checkpoint.tensors.get(name)
            if tensor is None:
                text = f"tensor_storage[{module!r}] lists it, no shard holds it"
                findings.warning("storage-absent", text, file=declared.storage_file, tensor=name)
            elif _has(says, "shape") and says["shape"] != list(tensor.shape):
                text = f"tensor_storage[{module!r}] says shape {says['shape']}, the shard {list(tensor.shape)}"
                findings.warning("storage-shape", text, file=declared.storage_file, tensor=name)


def _has(entry: object, key: str) -> bool:
    return isinstance(entry, dict) and entry.get(key) is not None


def _compare_head(declared: DeclaredQuantization, survey: _Survey, findings: Findings) -> None:
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


def _model(config: ModelConfig, file: Path, survey: _Survey, findings: Findings) -> ModelSummary:
    return ModelSummary(
        model_type=config.model_type,
        architectures=config.architectures or (),
        hidden_size=config.hidden_size,
        num_experts=config.expert_count(),
        top_k=config.top_k(),
        activation=_activation(config, file, survey, findings),
    )


def _activation(config: ModelConfig, file: Path, survey: _Survey, findings: Findings) -> ActivationSummary | None:
    key = config.activation_key()
    source = f"{file.name} {key} = {getattr(config, key)!r}" if key else ""
    try:
        activation: Activation | None = config.activation()
    except FormatError as error:
        findings.error("activation", type(error)(error.message, file=file))
        return None
    if activation is None:
        if survey.experts:
            text = f"{source}, which is not known" if key else f"{file.name} states no activation of the experts"
            findings.warning("activation", f"{text}; a caller must name it", file=file)
        return None
    gates = {name.projection for names in survey.experts.values() for name in names.values()}
    if gates and activation.gated != (Projection.GATE in gates):
        text = f"{source} takes {'a' if activation.gated else 'no'} gate, the experts have {', '.join(sorted(gates))}"
        findings.warning("activation", text, file=file)
    return ActivationSummary(
        kind=activation.kind,
        limit=None if math.isinf(activation.limit) else activation.limit,
        alpha=activation.alpha,
        beta=activation.beta,
        source=source,
    )
