"""Owns the tables that the documentation shows: Markdown made from receipts, between marks.  It must not measure.

A file says `<!-- receipts NAME: begin -->` and `<!-- receipts NAME: end -->`; what stands between is replaced by the
table of that name.  Equal receipts give equal bytes.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.figures import FIGURES, UNQUANTISED, Verdict, judge
from trellis_moe.receipts.peers import Peer, load_peers
from trellis_moe.receipts.schema import Ceiling, DeviceState, LayerCase, Receipt, Row
from trellis_moe.receipts.store import Published, load_published

__all__ = ["TABLES", "Content", "fill", "load_content", "update_tables"]

_MARK = re.compile(r"(<!-- receipts ([a-z-]+): begin -->\n).*?(<!-- receipts \2: end -->)", re.DOTALL)
_NONE = "No receipt has been published yet."
_PLOT_TITLES = {
    "layers": "Milliseconds of a layer over tokens",
    "roofline": "Operations a second over operations a byte, by rate",
    "staging": "Rate and peak memory of preparation over its bound",
}
_SHOWN = (1, 8, 32, 128, 1024, 8192)  # token counts of the short table


@dataclass(frozen=True)
class Content:
    """What tables are made from.

    Attributes:
        published: receipts, oldest first.
        peers: measurements of other projects.
        plots: drawings beside the receipts, as paths below `docs/benchmarks`.
    """

    published: tuple[Published, ...]
    peers: tuple[Peer, ...]
    plots: tuple[str, ...] = ()

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts alone."""
        return tuple(each.receipt for each in self.published)


def load_content(benchmarks: Path) -> Content:
    """Read the folder `docs/benchmarks`.

    Raises:
        MoeValueError: if a file in it is not what belongs there.
    """
    published = sorted(load_published(benchmarks), key=lambda each: (each.receipt.created, each.gpu, each.name))
    plots = sorted(str(path.relative_to(benchmarks)) for path in benchmarks.glob("*/*.svg"))
    return Content(tuple(published), load_peers(benchmarks), tuple(plots))


def update_tables(root: Path, *, write: bool = True) -> list[Path]:
    """Make every table in the README and below `docs/`.

    Args:
        root: folder of the repository.
        write: whether to write files that change.

    Returns:
        The files that change, or would.

    Raises:
        MoeValueError: if a receipt is none, or a mark names no table.
    """
    content = load_content(root / "docs" / "benchmarks")
    changed = []
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = path.read_text()
        made = fill(text, content)
        if made != text:
            changed.append(path)
            if write:
                path.write_text(made)
    return changed


def fill(text: str, content: Content) -> str:
    """A document with its tables made anew.

    Args:
        text: the document.
        content: what tables are made from.

    Raises:
        MoeValueError: if a mark names no table.
    """

    def replace(match: re.Match[str]) -> str:
        make = TABLES.get(match[2])
        if make is None:
            raise MoeValueError(f"there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{make(content)}\n{match[3]}"

    return _MARK.sub(replace, text)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    marks = ["---:" if index in right else "---" for index in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, marks, *rows])


def _verdicts(group: str, content: Content) -> str:
    rows = [
        (verdict.figure.target.title, verdict.figure.target.asked, _found(verdict), verdict.word)
        for verdict in judge((figure for figure in FIGURES if figure.group == group), content.receipts)
    ]
    return _table(("figure", "asked", "measured", "verdict"), rows)


def _found(verdict: Verdict) -> str:
    return "-" if verdict.found is None else verdict.found.text


def _summary(content: Content) -> str:
    verdicts = judge(FIGURES, content.receipts)
    rows = []
    for group in dict.fromkeys(figure.group for figure in FIGURES):
        words = [verdict.word for verdict in verdicts if verdict.figure.group == group]
        rows.append((group, *(str(words.count(word)) for word in ("met", "not met", "not measured"))))
    return _table(("figures", "met", "not met", "not measured"), rows, right=(1, 2, 3))


def _best(content: Content, mode: str, contender: str) -> dict[tuple[str, str, str], dict[int, tuple[LayerCase, Row]]]:
    """By layer and token count, the fastest row of a contender; a later receipt takes the place of an earlier one."""
    found: dict[tuple[str, str, str], dict[int, tuple[LayerCase, Row]]] = {}
    for receipt in content.receipts:
        here: dict[tuple[tuple[str, str, str], int], tuple[LayerCase, Row]] = {}
        for row in receipt.rows:
            case = row.case
            if not isinstance(case, LayerCase) or (case.mode, case.contender) != (mode, contender):
                continue
            if contender == "trellis" and case.io_dtype != "float16":
                continue
            place = (case.geometry, case.codebook, case.k), case.tokens
            if place not in here or row.median_ns < here[place][1].median_ns:
                here[place] = case, row
        for (layer, tokens), each in here.items():
            found.setdefault(layer, {})[tokens] = each
    return found


def _measured(content: Content) -> str:
    """The README's table: times at a few token counts beside what others take."""
    ours = _best(content, "graph", "trellis")
    if not ours:
        return _NONE
    others = _best(content, "graph", UNQUANTISED)
    rows = []
    for layer, counts in ours.items():
        for tokens in _SHOWN:
            if tokens not in counts:
                continue
            case, row = counts[tokens]
            millis = row.median_ns / 1e6
            grouped = others.get(layer, {}).get(tokens)
            unquantised = grouped[1].median_ns / 1e6 if grouped else None
            rows.append((
                f"{layer[0]}, K={layer[2]} {layer[1]}", f"{tokens:,}", f"{millis:.3f}", case.arithmetic,
                _other(_peer_time(content, "exllamav3", layer, tokens), millis), _other(unquantised, millis),
            ))  # fmt: skip
    header = ("layer", "tokens", "trellis, ms", "arithmetic", "exllamav3, ms", "bf16 grouped GEMM, ms")
    return _table(header, rows, right=(1, 2, 4, 5))


def _peer_time(content: Content, name: str, layer: tuple[str, str, str], tokens: int) -> float | None:
    times = [peer.time(*layer, tokens) for peer in content.peers if peer.contender.startswith(name)]
    return next((time for time in times if time is not None), None)


def _other(millis: float | None, ours: float) -> str:
    return "-" if millis is None else f"{millis:.3f} ({millis / ours:.1f} x)"


def _layers(content: Content) -> str:
    """Every row of a whole layer, of every receipt; a table for each layer."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for each in content.published:
        for row in each.receipt.rows:
            case = row.case
            if isinstance(case, LayerCase):
                tables.setdefault(f"{case.geometry}, K={case.k} {case.codebook}", []).append((
                    f"{case.tokens:,}", _ran(case), f"{row.median_ns / 1e3:.1f}", _spread(row.samples_ns),
                    f"{row.check.error:.0e}", *(_ratio(row, name) for name in ("device copy", "bf16 GEMM", "decode ")),
                ))  # fmt: skip
    header = ("tokens", "what", "median, us", "fastest to slowest", "error", "copy", "GEMM", "decode")
    made = [f"#### {layer}\n\n{_table(header, rows, (0, 2, 5, 6, 7))}" for layer, rows in tables.items()]
    return "\n\n".join(made) or _NONE


def _ran(case: LayerCase) -> str:
    """What ran, in few words: of trellis the arithmetic and the kernels; io and mode where they are not the usual."""
    words = case.contender if case.arithmetic == "none" else f"{case.arithmetic}, {case.path}"
    if case.contender not in ("trellis", words):
        words = f"{case.contender}, {words}"
    words += f", {case.io_dtype}" if case.contender == "trellis" and case.io_dtype != "float16" else ""
    return words if case.mode == "graph" else f"{words}, {case.mode}"


def _ratio(row: Row, name: str) -> str:
    """A row's share of the ceiling whose name begins so."""
    return next((f"{ratio.value:.0%}" for ratio in row.ratios if ratio.of.startswith(name)), "-")


def _spread(samples: Sequence[int]) -> str:
    return f"{min(samples) / 1e3:.1f} to {max(samples) / 1e3:.1f}"


def _ceilings(content: Content) -> str:
    rows = [
        (ceiling.name, each.receipt.machine.name, _rate(ceiling), _spread(ceiling.samples_ns))
        for each in content.published
        for ceiling in each.receipt.ceilings
    ]
    return _table(("ceiling", "GPU", "rate", "fastest to slowest, us"), rows) if rows else _NONE


def _rate(ceiling: Ceiling) -> str:
    scale, name = {"bytes": (1e9, "GB/s"), "flops": (1e12, "TFLOP/s"), "weights": (1e12, "T weights/s")}[ceiling.unit]
    return f"{ceiling.rate / scale:.4g} {name}"


def _provenance(content: Content) -> str:
    """Where each receipt comes from."""
    rows = []
    for each in content.published:
        receipt, machine = each.receipt, each.receipt.machine
        versions = receipt.versions
        rows.append((
            f"[{each.gpu}/{each.name}.json]({each.gpu}/{each.name}.json)", receipt.created, f"`{receipt.commit[:12]}`",
            f"{machine.count} x {machine.name}, driver {machine.driver}",
            f"CUDA {versions.cuda}, torch {versions.torch}, DSL {versions.dsl}, Python {versions.python}",
            f"{_states(machine.start)}; {_states(machine.end)}", f"`{receipt.command}`",
        ))  # fmt: skip
    header = ("receipt", "begun", "commit", "machine", "versions", "state at start; at end", "command")
    return _table(header, rows) if rows else _NONE


def _states(states: Sequence[DeviceState]) -> str:
    clock = statistics.fmean(state.sm_clock_mhz for state in states)
    memory = statistics.fmean(state.memory_clock_mhz for state in states)
    power = statistics.fmean(state.power_watts for state in states)
    degrees = max(state.temperature_celsius for state in states)
    return f"{clock:.0f} / {memory:.0f} MHz, {power:.0f} W, {degrees} C"


def _skipped(content: Content) -> str:
    rows = [
        (each.name, skipped.what.replace("|", "/"), skipped.why.replace("|", "/"))
        for each in content.published
        for skipped in each.receipt.skipped
    ]
    return _table(("receipt", "left out", "why"), rows) if rows else "Nothing was left out."


def _peers(content: Content) -> str:
    rows = [
        (peer.contender, f"{peer.gpu}, torch {peer.torch}, {peer.date}", peer.source, peer.method)
        for peer in content.peers
    ]
    return _table(("who", "where and when", "how it was got", "what was timed"), rows)


def _plots(content: Content) -> str:
    """Every drawing, for the page that lies beside the folders of the GPUs."""
    shown = [f"![{_title(path)}]({path})" for path in content.plots]
    return "\n\n".join(shown) or "Nothing has been drawn yet."


def _layer_plot(content: Content) -> str:
    """The drawing of times over tokens, for the README."""
    shown = [f"![{_title(path)}](docs/benchmarks/{path})" for path in content.plots if path.endswith("/layers.svg")]
    return "\n\n".join(shown) or "Nothing has been drawn yet."


def _title(path: str) -> str:
    gpu, name = path.removesuffix(".svg").split("/")
    return f"{_PLOT_TITLES.get(name, name)}, {gpu}"


TABLES: dict[str, Callable[[Content], str]] = {
    "measured": _measured,
    "summary": _summary,
    "few-tokens": lambda content: _verdicts("few tokens", content),
    "many-tokens": lambda content: _verdicts("many tokens", content),
    "ops": lambda content: _verdicts("ops", content),
    "decode": lambda content: _verdicts("decode", content),
    "preparation": lambda content: _verdicts("preparation", content),
    "ranks": lambda content: _verdicts("ranks", content),
    "layers": _layers,
    "ceilings": _ceilings,
    "provenance": _provenance,
    "skipped": _skipped,
    "peers": _peers,
    "plots": _plots,
    "layer-plot": _layer_plot,
}
"""What makes each table, by its name."""
