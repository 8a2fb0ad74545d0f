"""Owns the sorting of a checkpoint's modules for a report: sound linears, experts by layer, and what is set aside.

It must not read tensor data, nor judge a layer as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from trellis_format.checkpoint import Checkpoint
from trellis_format.errors import FormatError, FormatUnsupportedError
from trellis_format.exl3.declared import DeclaredQuantization
from trellis_format.exl3.layers import LayerKey, group_modules
from trellis_format.exl3.linear import Exl3Linear, describe_linear
from trellis_format.exl3.names import ExpertName, match_expert
from trellis_format.files.arrays import FileArray
from trellis_format.findings import Findings
from trellis_format.survey import SkipReason, TensorClass, class_of, flat_trellis_reason, skip_reason

__all__ = ["Survey", "sort_modules"]


@dataclass
class Survey:
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


def sort_modules(
    checkpoint: Checkpoint,
    pattern: re.Pattern[str],
    declared: DeclaredQuantization,
    survey: Survey,
    findings: Findings,
) -> None:
    """Sort the tensors of a checkpoint into linears, experts and what is skipped; what breaks a rule is a finding.

    Args:
        checkpoint: an opened checkpoint.
        pattern: of expert names.
        declared: what the configurations state about linears.
        survey: added to.
        findings: added to.
    """
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


def _describe(
    survey: Survey, name: str, tensors: Mapping[str, FileArray], declared: DeclaredQuantization, findings: Findings
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


def _survey_others(survey: Survey, others: Mapping[str, FileArray], findings: Findings) -> None:
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
