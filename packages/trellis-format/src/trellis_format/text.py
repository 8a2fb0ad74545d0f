"""Owns how a report reads on a terminal: one list of sections, drawn plainly or with rich where it is installed.

It must not add to the report or judge it.  Names come from foreign files, so whatever a terminal might obey is escaped.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from trellis_format.report import BitsPerWeight, InspectReport, LayerSummary
from trellis_format.terminal import printable

__all__ = ["Section", "sections", "write_plain", "write_report"]


@dataclass(frozen=True)
class Section:
    """A titled table; `columns` is empty for a list of key and value."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sections(report: InspectReport) -> Iterator[Section]:
    """What a report says, in reading order; empty sections are left out."""
    for section in (
        Section("Checkpoint", (), tuple(_overview(report))),
        Section("Stated by the configuration", ("key", "value", "files"), tuple(_stated(report))),
        Section(
            "Layers with experts",
            ("layers", "experts", "hidden", "intermediate", "K", "codebook", "bits/weight", "bytes", "even ranks"),
            tuple(_layers(report)),
        ),
        Section("Layer files", ("layer", "file", "sha256, not computed"), tuple(_layer_files(report))),
        Section("Bits per weight", ("part", "linears", "codes", "all tensors"), tuple(_bits(report))),
        Section("Bytes", ("part", "bytes"), tuple(_bytes(report))),
        Section("Not read as linears", ("reason", "tensors", "bytes", "dtype", "names"), tuple(_skipped(report))),
        Section("Findings", ("severity", "code", "message", "tensor", "file"), tuple(_findings(report))),
    ):
        if section.rows:
            yield section


def write_report(report: InspectReport, stream: TextIO) -> None:
    """Write a report for a reader: with rich on a terminal that has it, plainly otherwise."""
    console = _rich_console(stream)
    if console is None:
        write_plain(report, stream)
    else:
        _write_rich(report, console)


def write_plain(report: InspectReport, stream: TextIO) -> None:
    """Write a report as text tables."""
    for number, section in enumerate(sections(report)):
        stream.write("\n" * (number > 0) + f"{section.title}\n")
        rows = [section.columns, *section.rows] if section.columns else list(section.rows)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            stream.write(("  " + "  ".join(cells)).rstrip() + "\n")
    stream.write(f"\n{verdict(report)}\n")


def verdict(report: InspectReport) -> str:
    """The findings in one line."""
    counts = {"error": 0, "warning": 0, "note": 0}
    for finding in report.findings:
        counts[finding.severity.value] += 1
    return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items())


def _rich_console(stream: TextIO) -> Any:
    if not stream.isatty():
        return None
    try:  # by name at run time: the package is complete without it
        return importlib.import_module("rich.console").Console(file=stream)
    except ImportError:  # the extra `cli` brings it
        return None


def _write_rich(report: InspectReport, console: Any) -> None:
    table_class, text_class = importlib.import_module("rich.table").Table, importlib.import_module("rich.text").Text
    box = importlib.import_module("rich.box").SIMPLE_HEAD
    for section in sections(report):
        table = table_class(title=section.title, title_justify="left", box=box, show_header=bool(section.columns))
        for column in section.columns or ("", ""):
            table.add_column(column, overflow="fold")
        for row in section.rows:
            table.add_row(*map(text_class, row))  # Text, since a name may look like markup
        console.print(table)
    console.print(text_class(verdict(report)))


def _overview(report: InspectReport) -> Iterator[tuple[str, str]]:
    model = report.model
    yield "path", printable(report.path)
    yield "container", report.container
    yield "shards", f"{len(report.shards)} with {sum(shard.tensors for shard in report.shards)} tensors"
    yield "model", printable(model.model_type or "not stated")
    if model.architectures:
        yield "architecture", printable(", ".join(model.architectures))
    yield "experts", f"{_or_unknown(model.num_experts)}, {_or_unknown(model.top_k)} per token"
    if model.activation is not None:
        law = model.activation
        limit = "" if law.limit is None else f", limit {law.limit:g}, alpha {law.alpha:g}, beta {law.beta:g}"
        yield "activation", printable(f"{law.kind}{limit} ({law.source})")
    transforms = report.transforms
    signs = transforms.linears_with_packed_signs
    packed = f", {signs} with packed signs" if signs else ""
    blocks = f", blocks of {transforms.block_size} channels" if transforms.block_size else ""
    yield "transform", f"{transforms.kind}{blocks}{packed}"
    if transforms.expert is not None:
        yield "expert transform", transforms.expert


def _or_unknown(value: int | None) -> str:
    return "not stated" if value is None else str(value)


def _stated(report: InspectReport) -> Iterator[tuple[str, ...]]:
    """One row for each key and value, with every file that states it."""
    files: dict[tuple[str, str], list[str]] = {}
    for stated in report.stated:
        key = stated.field.rpartition("quantization_config.")[2]
        files.setdefault((key, stated.value), []).append(_file_name(stated.file))
    for (key, value), names in files.items():
        yield printable(key), printable(value), printable(", ".join(dict.fromkeys(names)))


def _layers(report: InspectReport) -> Iterator[tuple[str, ...]]:
    """One row for each run of layers that differ in index alone, those of the main stack first."""
    run: list[LayerSummary] = []
    row: tuple[str, ...] = ()
    for layer in sorted(report.layers, key=lambda layer: layer.auxiliary):
        current = _layer_cells(layer)
        follows = run and layer.auxiliary == run[-1].auxiliary and layer.index == run[-1].index + 1
        if run and not (follows and current == row):
            yield _run_name(run), *row
            run = []
        run, row = [*run, layer], current
    if run:
        yield _run_name(run), *row


def _layer_files(report: InspectReport) -> Iterator[tuple[str, ...]]:
    for layer in report.layers:
        if layer.file is not None:
            yield str(layer.index), printable(layer.file), printable(layer.sha256 or "-")


def _run_name(run: Sequence[LayerSummary]) -> str:
    first, last = run[0], run[-1]
    name = str(first.index) if first is last else f"{first.index}-{last.index}"
    return f"{name} (mtp)" if first.auxiliary else name


def _layer_cells(layer: LayerSummary) -> tuple[str, ...]:
    codebooks = sorted({name for projection in layer.projections for name in projection.codebooks})
    parallel = layer.tensor_parallel
    return (
        str(layer.experts) + ("" if layer.readable else " (not readable)"),
        _size(layer.hidden_size, layer.padded_hidden_size),
        _size(layer.intermediate_size, layer.padded_intermediate_size),
        _rates(layer),
        ", ".join(codebooks) or "-",
        _number(layer.bits.total),
        f"{layer.bytes:,}",
        "-" if parallel is None else ", ".join(map(str, parallel.even)) or "none",
    )


def _rates(layer: LayerSummary) -> str:
    """K of the layer, or of each projection: "3", "gate 3, up 3, down 4", "gate 2-4, ...", "pairs P33"."""
    if layer.pair_kinds:
        return f"pairs {', '.join(layer.pair_kinds)}"
    texts = {projection.projection: _span(projection.rates) for projection in layer.projections}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items()) or "-"


def _span(rates: dict[str, int]) -> str:
    ordered = sorted(rates, key=float)
    return "-" if not ordered else ordered[0] if len(ordered) == 1 else f"{ordered[0]}-{ordered[-1]}"


def _size(true: int | None, stored: int | None) -> str:
    if true is None or stored is None:
        return "-"
    return str(true) if true == stored else f"{true} in {stored}"


def _bits(report: InspectReport) -> Iterator[tuple[str, ...]]:
    parts = report.bits_per_weight
    named: Iterable[tuple[str, BitsPerWeight]] = (
        ("model", parts.model),
        ("experts", parts.experts),
        ("shared experts", parts.shared_experts),
        ("other linears", parts.linears),
        ("head", parts.head),
    )
    for name, bits in named:
        if bits.linears:
            yield name, str(bits.linears), _number(bits.codes), _number(bits.total)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _bytes(report: InspectReport) -> Iterator[tuple[str, str]]:
    for name, nbytes in report.bytes.model_dump().items():
        if nbytes or name == "total":
            yield name.replace("_", " "), f"{nbytes:,}"


def _skipped(report: InspectReport) -> Iterator[tuple[str, ...]]:
    for group in report.skipped:
        yield group.reason, str(group.tensors), f"{group.bytes:,}", ", ".join(group.dtypes), printable(group.pattern)


def _findings(report: InspectReport) -> Iterator[tuple[str, ...]]:
    for found in report.findings:
        where = printable(_file_name(found.file or ""))
        yield found.severity.value, found.code, printable(found.message), printable(found.tensor or ""), where


def _file_name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
