"""Owns the plots that the documentation shows, drawn from receipts.  It must not measure.

Equal receipts give equal files under one version of matplotlib: nothing in a file tells when or by what it was drawn.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trellis_moe.errors import MoeUnsupportedError
from trellis_moe.receipts.figures import UNQUANTISED
from trellis_moe.receipts.peers import Peer
from trellis_moe.receipts.schema import LayerCase, PrepareCase, Receipt, Row
from trellis_moe.receipts.store import gpu_folder
from trellis_moe.receipts.tables import load_content

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PLOTS", "draw"]

PLOTS = ("roofline", "layers", "staging")
"""Names of the plots of a GPU, each an SVG and a PNG."""

_STYLE: dict[str, Any] = {
    "svg.hashsalt": "trellis",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "savefig.facecolor": "white",
}
_DPI = 54
_COLOUR_COUNT = 16  # of a PNG, which is a third of its size without
_COLOURS = {"trellis": "tab:blue", "exllamav3": "tab:red", UNQUANTISED: "tab:gray"}
_TICKS = [4**power for power in range(8)]  # token counts
_LEAST_COUNTS = 3  # of rows that make a panel
_MIB = 1 << 20


def draw(benchmarks: Path) -> list[Path]:
    """Draw the plots of every GPU that has receipts.

    Args:
        benchmarks: the folder `docs/benchmarks`; plots go beside the receipts.

    Returns:
        The files that were written.

    Raises:
        MoeUnsupportedError: if matplotlib is not installed.
        MoeValueError: if a receipt is none.
    """
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MoeUnsupportedError(
            "plots need matplotlib, which is not installed; it comes with trellis-moe[bench]"
        ) from error
    mpl.use("Agg")
    content = load_content(benchmarks)
    written: list[Path] = []
    for gpu in dict.fromkeys(each.gpu for each in content.published):
        receipts = [each.receipt for each in content.published if each.gpu == gpu]
        peers = [peer for peer in content.peers if gpu_folder(peer.gpu) == gpu]
        with mpl.rc_context(_STYLE):
            figures = {"roofline": _roofline(receipts, peers), "layers": _layers(receipts, peers)}
            figures["staging"] = _staging(receipts)
            for name, figure in figures.items():
                if figure is not None:
                    written += _save(figure, benchmarks / gpu / name)
    return written


def _save(figure: Figure, stem: Path) -> list[Path]:
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter
    from PIL import Image

    for axes in figure.axes:
        axes.minorticks_off()  # on logarithmic axes they are most of the file
        axes.grid(clip_on=False)  # a line of the grid ends where the panel does
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    paths = [stem.with_suffix(".svg"), stem.with_suffix(".png")]
    drawing, pixels = io.StringIO(), io.BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None, "Creator": None})
    paths[0].write_text(_smaller(drawing.getvalue()))
    figure.savefig(pixels, format="png", dpi=_DPI, metadata={"Software": None})
    pyplot.close(figure)
    Image.open(pixels).convert("RGB").quantize(_COLOUR_COUNT).save(paths[1], optimize=True)
    return paths


def _smaller(svg: str) -> str:
    """The same drawing in a fifth of the bytes: tenths of a point, styles once, short names, nothing without effect."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\.\d)\d+", r"\1", tag[0]).replace(".0 ", " "), svg)
    names = dict.fromkeys(re.findall(r'(?:href="|url\()#([a-z0-9]+)', svg))
    shorter = {name: f"{name[0]}{index}" for index, name in enumerate(names)}
    svg = re.sub(r'(id="|href="#|url\(#)([a-z0-9]+)', lambda match: match[1] + shorter.get(match[2], match[2]), svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r"<g [^>]*/>", "", svg)
    svg = re.sub(r'<g id="[a-z0-9_.]+">', "<g>", svg)
    svg = _without_bare_groups(svg)
    styles = list(dict.fromkeys(re.findall(r' style="([^"]*)"', svg)))
    svg = re.sub(r' style="([^"]*)"', lambda match: f' class="s{styles.index(match[1])}"', svg)
    marks = r'<g (clip-path="[^"]*")>((?:\s*<use [^>]*( class="s\d+")/>)+\s*)</g>'  # a line has one look
    svg = re.sub(marks, lambda match: f"<g {match[1]}{match[3]}>{match[2].replace(match[3], '')}</g>", svg)
    rules = "".join(f".s{index}{{{style}}}\n" for index, style in enumerate(styles))
    svg = svg.replace("<defs>", f"<style>\n{rules}</style>\n<defs>", 1)
    return re.sub(r"\s*\n\s*", "\n", svg).strip() + "\n"


def _without_bare_groups(svg: str) -> str:
    """Without the groups that have no attribute, which change nothing."""
    kept, parts = [], []
    for part in re.split(r"(<g>|<g [^>]*>|</g>)", svg):
        if part.startswith("<g"):
            kept.append(part != "<g>")
            parts.append(part if kept[-1] else "")
        elif part == "</g>":
            parts.append(part if kept.pop() else "")
        else:
            parts.append(part)
    return "".join(parts)


def _panels(count: int, *, width: float = 4.0, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """A figure of that many panels, at most three beside each other."""
    from matplotlib import pyplot

    columns = 2 if count == 4 else min(count, 3)
    rows = math.ceil(count / columns)
    figure, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    flat = list(axes.flat)
    for spare in flat[count:]:
        spare.set_axis_off()
    return figure, flat[:count]


def _name_lines(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend below all panels."""
    named: dict[str, Any] = {}
    for axes in panels:
        lines, names = axes.get_legend_handles_labels()
        named = dict(zip(names, lines, strict=True)) | named
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=len(named))


def _layer_rows(receipts: Iterable[Receipt], contender: str) -> dict[tuple[str, str, str], dict[int, Row]]:
    """By layer and token count, the fastest row in a graph with float16 or, of others, any io."""
    found: dict[tuple[str, str, str], dict[int, Row]] = {}
    for receipt in receipts:
        for row in receipt.rows:
            case = row.case
            if not isinstance(case, LayerCase) or (case.contender, case.mode) != (contender, "graph"):
                continue
            if contender == "trellis" and case.io_dtype != "float16":
                continue
            counts = found.setdefault((case.geometry, case.codebook, case.k), {})
            if case.tokens not in counts or row.median_ns < counts[case.tokens].median_ns:
                counts[case.tokens] = row
    return found


def _peer(peers: Sequence[Peer], name: str) -> Peer | None:
    return next((peer for peer in peers if peer.contender.startswith(name)), None)


def _layers(receipts: Sequence[Receipt], peers: Sequence[Peer]) -> Figure | None:
    """Time against tokens, one panel for each layer."""
    ours = {layer: rows for layer, rows in _layer_rows(receipts, "trellis").items() if len(rows) >= _LEAST_COUNTS}
    if not ours:
        return None
    grouped, peer = _layer_rows(receipts, UNQUANTISED), _peer(peers, "exllamav3")
    figure, panels = _panels(len(ours))
    for axes, (layer, rows) in zip(panels, ours.items(), strict=True):
        lines: dict[str, Mapping[int, float]] = {"trellis": {n: row.median_ns / 1e6 for n, row in rows.items()}}
        if peer is not None:
            times = {row.tokens: peer.time(*layer, row.tokens) for row in peer.rows if row.geometry == layer[0]}
            lines["exllamav3"] = {tokens: time for tokens, time in times.items() if time is not None}
        lines[UNQUANTISED] = {n: row.median_ns / 1e6 for n, row in grouped.get(layer, {}).items()}
        for name, line in lines.items():
            if line:
                counts = sorted(line)
                axes.plot(counts, [line[n] for n in counts], "o-", color=_COLOURS[name], label=name)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms")
        axes.set_xticks(_TICKS, labels=map(str, _TICKS))
        axes.set_xlim(min(rows) / 1.5, max(rows) * 1.5)
        axes.set_title(f"{layer[0]}, K={layer[2]} {layer[1]}")
    _name_lines(figure, panels)
    return figure


def _roofline(receipts: Sequence[Receipt], peers: Sequence[Peer]) -> Figure | None:
    """Operations a second over operations a byte, one panel for each rate.

    Roofs are those of the last receipt with layers of that rate: copying, decoding as weights a second times the
    operations that a weight of K / 8 bytes has at that intensity, and the dense product.
    """
    by_rate: dict[str, list[tuple[Receipt, LayerCase, Row]]] = {}
    for receipt in receipts:
        fastest: dict[tuple[str, str, str, int], tuple[LayerCase, Row]] = {}
        for row in receipt.rows:
            case = row.case
            if isinstance(case, LayerCase) and (case.contender, case.mode) == ("trellis", "graph"):
                place = case.geometry, case.codebook, case.k, case.tokens
                if place not in fastest or row.median_ns < fastest[place][1].median_ns:
                    fastest[place] = case, row
        for case, row in fastest.values():
            by_rate.setdefault(case.k, []).append((receipt, case, row))
    by_rate = {k: rows for k, rows in by_rate.items() if len(rows) >= _LEAST_COUNTS}
    if not by_rate:
        return None
    figure, panels = _panels(len(by_rate))
    for axes, k in zip(panels, sorted(by_rate, key=float), strict=True):
        _rate_panel(axes, k, by_rate[k], _peer(peers, "exllamav3"))
    _name_lines(figure, panels)
    return figure


def _rate_panel(axes: Axes, k: str, rows: Sequence[tuple[Receipt, LayerCase, Row]], peer: Peer | None) -> None:
    receipt = rows[-1][0]
    rates = {ceiling.name: ceiling.rate for ceiling in receipt.ceilings}
    intensities = [row.flops / row.bytes for _, _, row in rows]
    span = [min(intensities) / 2, max(intensities) * 2]
    flat = rates.get("bf16 GEMM", math.inf)
    roofs = {"device copy": rates.get("device copy", math.nan)}
    for codebook in sorted({case.codebook for _, case, _ in rows}):
        weights = rates.get(f"decode {codebook} K={k} from registers")
        if weights is not None:
            roofs[f"decode {codebook}"] = weights * float(k) / 8
    for (name, slope), style in zip(roofs.items(), ("--", "-.", ":", (0, (1, 3))), strict=False):
        knee = flat / slope
        points = sorted({span[0], span[1], *([knee] if span[0] < knee < span[1] else [])})
        axes.plot(points, [min(slope * x, flat) / 1e12 for x in points], linestyle=style, color="black", label=name)
    axes.scatter(
        intensities, [row.rate("flops") / 1e12 for _, _, row in rows], color=_COLOURS["trellis"], s=14, label="trellis"
    )
    if peer is not None:
        pairs = [(row, peer.time(case.geometry, case.codebook, k, case.tokens)) for _, case, row in rows]
        known = [(row.flops / row.bytes, row.flops / millis / 1e9) for row, millis in pairs if millis is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.scatter(x, y, color=_COLOURS["exllamav3"], s=14, marker="x", label="exllamav3")
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
    axes.set_title(f"K = {k}")


def _staging(receipts: Sequence[Receipt]) -> Figure | None:
    """Rate and peak memory of preparation over its bound, of the layer with most bounds."""
    found: dict[str, dict[int, tuple[Receipt, Row]]] = {}
    for receipt in receipts:
        for row in receipt.rows:
            if isinstance(row.case, PrepareCase) and row.case.layers == 1:
                found.setdefault(row.case.layer, {})[row.case.bound_bytes] = receipt, row
    if not found:
        return None
    name, rows = max(found.items(), key=lambda each: len(each[1]))
    bounds = sorted(rows)
    mib = [bound / _MIB for bound in bounds]
    figure, (speed, memory) = _panels(2)
    speed.plot(mib, [rows[b][1].rate("bytes") / 1e9 for b in bounds], "o-", color="tab:blue", label="preparation")
    copies = [rows[b][0].ceiling(rows[b][1].ratios[0].of).rate / 1e9 for b in bounds]
    speed.plot(mib, copies, "s--", color="tab:gray", label="pinned copy of as many bytes")
    speed.set(xlabel="staging bound, MiB", ylabel="GB/s", title=name)
    speed.set_ylim(bottom=0)
    memory.plot(mib, mib, ":", color="black", label="bound")
    for place, marker in (("host", "o-"), ("device", "s-")):
        peaks = [getattr(rows[b][1].memory, f"peak_{place}_bytes") for b in bounds]
        known = [(x, peak / _MIB) for x, peak in zip(mib, peaks, strict=True) if peak is not None]
        if known:
            x, y = zip(*known, strict=True)
            memory.plot(x, y, marker, label=f"{place}, beyond the weights")
    memory.set(xlabel="staging bound, MiB", ylabel="MiB", title="peak memory")
    memory.set_ylim(bottom=0)
    for axes in (speed, memory):
        axes.set_xscale("log")
        axes.set_xticks(mib, labels=[f"{each:g}" for each in mib])
        axes.legend()
    return figure
