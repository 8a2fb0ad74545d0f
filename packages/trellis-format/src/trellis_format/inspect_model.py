"""Owns what a report says about a model's configuration, alone and against the sizes of its layers.

It must not read tensors.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from trellis_format.activations import Activation
from trellis_format.errors import FormatError
from trellis_format.extent import BLOCK
from trellis_format.findings import Findings
from trellis_format.model_config import ModelConfig, parse_model_config
from trellis_format.report import ActivationSummary, ModelSummary
from trellis_format.source import ExpertGeometry, Projection

__all__ = ["compare_sizes", "read_model", "summarise_model"]


def read_model(config: dict[str, Any] | None, file: Path, findings: Findings) -> ModelConfig | None:
    """What a configuration says; None, with a finding, where it breaks a rule.

    Args:
        config: parsed `config.json`, or None without one.
        file: its path.
        findings: added to.
    """
    if config is None:
        findings.warning("config-missing", "no configuration: sizes are taken as stored", file=file)
    try:
        return parse_model_config(config, file=str(file))
    except FormatError as error:
        findings.error("config-invalid", error)
        return None


def summarise_model(
    config: ModelConfig,
    file: Path,
    projections: Collection[Projection],
    findings: Findings,
    *,
    stated: tuple[Activation, str] | None = None,
) -> ModelSummary:
    """What a report says about the model.

    Args:
        config: what `config.json` says.
        file: its path.
        projections: those that the experts have; empty without experts.
        findings: added to.
        stated: the activation and the source of it, where a manifest states it, which `config.json` then does not.
    """
    if stated is None:
        key = config.activation_key()
        source = f"{file.name} {key} = {getattr(config, key)!r}" if key else ""
        try:
            law = config.activation()
        except FormatError as error:
            findings.error("activation", type(error)(error.message, file=file))
            law, projections = None, ()
    else:
        law, source = stated
    return ModelSummary(
        model_type=config.model_type,
        architectures=config.architectures or (),
        hidden_size=config.hidden_size,
        num_experts=config.expert_count(),
        top_k=config.top_k(),
        activation=_activation(law, source, file, projections, findings),
    )


def _activation(
    law: Activation | None, source: str, file: Path, projections: Collection[Projection], findings: Findings
) -> ActivationSummary | None:
    if law is None:
        if projections:
            text = f"{source}, which is not known" if source else f"{file.name} states no activation of the experts"
            findings.warning("activation", f"{text}; a caller must name it", file=file)
        return None
    if projections and law.gated != (Projection.GATE in projections):
        having = ", ".join(sorted(projections))
        text = f"{source} takes {'a' if law.gated else 'no'} gate, the experts have {having}"
        findings.warning("activation", text, file=file)
    return ActivationSummary(
        kind=law.kind,
        limit=None if math.isinf(law.limit) else law.limit,
        alpha=law.alpha,
        beta=law.beta,
        source=source,
    )


def compare_sizes(
    file: Path, layer: int, prefix: str, geometry: ExpertGeometry, config: ModelConfig, findings: Findings
) -> None:
    """Compare the sizes of a layer with the configuration's; what differs is a finding, the tensors decide.

    Args:
        file: path of the configuration.
        layer: index.
        prefix: path of the layer's experts.
        geometry: sizes of the tensors.
        config: what the configuration says.
        findings: added to.
    """
    for axis, stored, candidates in (
        ("hidden", geometry.padded_hidden_size, config.hidden_sizes()),
        ("intermediate", geometry.padded_intermediate_size, config.expert_widths()),
    ):
        if candidates and stored not in {-(-width // BLOCK) * BLOCK for width in candidates.values()}:
            said = ", ".join(f"{name} = {width}" for name, width in candidates.items())
            findings.warning(
                f"{axis}-size",
                f"layer {layer}: {file.name} says {said}, the tensors have {stored} {axis} channels, padding to "
                f"{BLOCK} included; the tensors are taken",
                file=file,
                tensor=prefix or None,
            )
    for key in config.zeros():
        text = f"layer {layer}: {file.name} says {key} = 0, the tensors have {geometry.num_experts} experts"
        findings.warning("expert-count", f"{text}; the tensors are taken", file=file, tensor=prefix or None)
    declared = config.expert_count()
    if declared is not None and declared < geometry.num_experts:
        text = f"layer {layer}: {file.name} says {declared} experts, the tensors have {geometry.num_experts}"
        findings.warning("expert-count", f"{text}; the tensors are taken", file=file, tensor=prefix or None)
