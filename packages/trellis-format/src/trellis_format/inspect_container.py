"""Owns what a report says about a container of layer files, from its manifest and the files' headers.

It must not compute a digest, nor know what lies beside the layer files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trellis_format.activations import Activation
from trellis_format.checkpoint import CONFIG_NAME
from trellis_format.convert_names import LayerNames, read_names
from trellis_format.errors import FormatError
from trellis_format.files.layer_file import LayerFile
from trellis_format.findings import Findings
from trellis_format.inspect_model import compare_sizes
from trellis_format.layer_files import LayerFacts, LayerFiles
from trellis_format.model_config import ModelConfig, true_width
from trellis_format.rates import Rate
from trellis_format.report import (
    BitsPerWeight,
    LayerSummary,
    ProjectionSummary,
    ShardSummary,
    StatedValue,
    TensorParallel,
    Transforms,
)
from trellis_format.source import Projection
from trellis_format.summaries import tensor_parallel

__all__ = ["ContainerPart", "inspect_layers"]


@dataclass(frozen=True)
class ContainerPart:
    """The part of a report that layer files are; without any fields that of a checkpoint that has none.

    Attributes:
        layers: one for each layer that the manifest lists.
        shards: the layer files that can be opened.
        stated: what the manifest states.
        projections: those that the experts have.
        activation: the law that the manifest states, and its source.
        rotation: kind and channels of the rotation of every linear.
        transform: the change of basis at the activation, in words.
    """

    layers: tuple[LayerSummary, ...] = ()
    shards: tuple[ShardSummary, ...] = ()
    stated: tuple[StatedValue, ...] = ()
    projections: frozenset[Projection] = frozenset()
    activation: tuple[Activation, str] | None = None
    rotation: tuple[str, int] | None = None
    transform: str | None = None
    linears: int = field(default=0)

    def transforms(self, beside: Transforms) -> Transforms:
        """The transforms of these layers and of the linears beside them."""
        if self.rotation is None:
            return beside
        kind, block = self.rotation
        vectors = beside.linears_with_vectors + self.linears
        changes = {"kind": kind, "block_size": block, "linears_with_vectors": vectors, "expert": self.transform}
        return beside.model_copy(update=changes)


def inspect_layers(files: LayerFiles, config: ModelConfig, refused: bool, findings: Findings) -> ContainerPart:
    """Report the layers of a container.

    Args:
        files: its layer files.
        config: what the model's configuration says.
        refused: whether that configuration breaks a rule, so that no layer can be read.
        findings: added to.
    """
    manifest = files.path / files.manifest_name
    try:
        names: Mapping[int, LayerNames] = read_names(files.path)
    except FormatError as error:
        findings.error("container-invalid", error)
        names = {}
    layers, shards = [], []
    for layer, name in files.names.items():
        prefix = names[layer].prefix if layer in names else ""
        try:
            with files.open(layer) as file:
                layers.append(_layer(files, layer, prefix, file, config, refused, findings))
                sizes = [tensor.nbytes for tensor in file.tensors.values()]
                shards.append(ShardSummary(name=name, bytes=sum(sizes), tensors=len(sizes)))
        except FormatError as error:
            placed = error if error.file else type(error)(error.message, file=files.path / name, tensor=error.tensor)
            findings.error("container-invalid", placed)
            layers.append(_broken(files, layer, prefix))
    activation = None
    if files.activation is not None:
        activation = (files.activation, f"{files.manifest_name} activation.kind = {files.activation.kind!r}")
    return ContainerPart(
        layers=tuple(layers),
        shards=tuple(shards),
        stated=tuple(StatedValue(file=str(manifest), field=key, value=value) for key, value in files.statements()),
        projections=frozenset(files.projections),
        activation=activation,
        rotation=files.rotation,
        transform=files.transform,
        linears=sum(layer.bits.linears for layer in layers),
    )


def _layer(
    files: LayerFiles,
    layer: int,
    prefix: str,
    file: LayerFile,
    config: ModelConfig,
    refused: bool,
    findings: Findings,
) -> LayerSummary:
    facts = files.facts(layer, file)
    where = Path(file.path)
    if facts.obstacle is not None:
        findings.note("not-described", f"layer {layer}: {facts.obstacle}", file=where)
    if facts.geometry is not None:
        compare_sizes(files.path / CONFIG_NAME, layer, prefix, facts.geometry, config, findings)
    nbytes = sum(tensor.nbytes for tensor in file.tensors.values())
    return _summary(files, layer, prefix, facts, config, nbytes, readable=facts.obstacle is None and not refused)


def _summary(
    files: LayerFiles,
    layer: int,
    prefix: str,
    facts: LayerFacts,
    config: ModelConfig,
    nbytes: int,
    *,
    readable: bool,
) -> LayerSummary:
    hidden, intermediate = facts.hidden_size, facts.intermediate_size
    if facts.geometry is not None:
        hidden, intermediate = facts.geometry.hidden_size, facts.geometry.intermediate_size
    if hidden == facts.hidden_size:
        hidden = true_width(hidden, config.hidden_sizes())
    if intermediate == facts.intermediate_size:
        intermediate = true_width(intermediate, config.expert_widths())
    return LayerSummary(
        index=layer,
        prefix=prefix,
        auxiliary=False,
        readable=readable,
        experts=facts.num_experts,
        hidden_size=hidden,
        padded_hidden_size=facts.hidden_size,
        intermediate_size=intermediate,
        padded_intermediate_size=facts.intermediate_size,
        projections=tuple(_projection(files, facts, index) for index in range(len(facts.projections))),
        bits=_bits(facts, nbytes),
        bytes=nbytes,
        up_divisor=facts.up_divisor,
        tensor_parallel=_tensor_parallel(files, facts.intermediate_size),
        pair_kinds=files.pair_kinds,
        file=files.names[layer],
        sha256=files.digests[layer],
    )


def _broken(files: LayerFiles, layer: int, prefix: str) -> LayerSummary:
    """What the manifest alone tells of a layer whose file cannot be read."""
    return LayerSummary(
        index=layer,
        prefix=prefix,
        auxiliary=False,
        readable=False,
        experts=0,
        hidden_size=None,
        padded_hidden_size=None,
        intermediate_size=None,
        padded_intermediate_size=None,
        projections=(),
        bits=BitsPerWeight(linears=0, weights=0, codes=None, total=None),
        bytes=0,
        up_divisor=1.0,
        tensor_parallel=None,
        pair_kinds=files.pair_kinds,
        file=files.names[layer],
        sha256=files.digests[layer],
    )


def _tensor_parallel(files: LayerFiles, intermediate_size: int) -> TensorParallel:
    return tensor_parallel(intermediate_size, alignment_slots=files.alignment_slots, barriers=files.barriers)


def _half_bits(facts: LayerFacts, index: int) -> Counter[int]:
    """Experts by 2K of one projection, without a loop over experts that share a rate: their number is a claim."""
    if facts.rates is None:
        return Counter()
    rows = facts.rates.half_bits
    each = facts.num_experts if len(rows) == 1 else 1
    counts: Counter[int] = Counter()
    for row in rows:
        counts[row[index if len(row) > 1 else 0]] += each
    return counts


def _projection(files: LayerFiles, facts: LayerFacts, index: int) -> ProjectionSummary:
    projection = facts.projections[index]
    k, n = facts.hidden_size, facts.intermediate_size
    if projection is Projection.DOWN:
        k, n = n, k
    counts = _half_bits(facts, index)
    rates = {str(Rate(half_bits)): count for half_bits, count in sorted(counts.items())}
    codes = sum(half_bits * count for half_bits, count in counts.items()) * k * n // 16
    return ProjectionSummary(
        projection=projection.value,
        shapes={f"{k} x {n}": facts.num_experts},
        rates=rates,
        codebooks={files.codebook: facts.num_experts},
        biased=facts.num_experts if projection in facts.biased else 0,
        bytes=codes if counts else None,
    )


def _bits(facts: LayerFacts, nbytes: int) -> BitsPerWeight:
    linears = facts.num_experts * len(facts.projections)
    each = facts.hidden_size * facts.intermediate_size
    counts = sum((_half_bits(facts, index) for index in range(len(facts.projections))), Counter[int]())
    total = sum(half_bits * count for half_bits, count in counts.items())
    return BitsPerWeight(
        linears=linears,
        weights=linears * each,
        codes=total / 2 / linears if counts else None,
        total=nbytes * 8 / (linears * each),
    )
