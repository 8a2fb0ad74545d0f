"""Owns the pictures of the documentation: what they show is computed by the packages, so that it cannot drift.

It must not read a clock, a random number or a font: the same packages draw the same bytes, which a test holds.

    python docs/pictures/draw.py        writes the SVG files beside this one
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np

from trellis_format.codebooks import get_codebook
from trellis_format.extent import BLOCK_SLOTS, SLOT
from trellis_format.rates import STATE_BITS, TILE, TILE_WEIGHTS, Rate
from trellis_format.ring import unpack_states
from trellis_format.tiles import COLUMN, POSITION, ROW
from trellis_prep import balanced_extents

__all__ = ["PICTURES", "extents_at_tp9", "life_of_a_weight", "tile_and_ring"]

INK, PAPER, FAINT, ACCENT = "#1b1f24", "#ffffff", "#d8dee4", "#3f51b5"
RANKS = ("#c5cae9", "#b2dfdb", "#ffe0b2", "#f8bbd0", "#dcedc8", "#b3e5fc", "#ffccbc", "#d1c4e9", "#fff9c4")
K3 = Rate.of(3)
KIMI_CHANNELS, KIMI_BARRIER, TP = 3072, 48, 9


class Sheet:
    """A white sheet of a size in pixels, on which shapes are put in order."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._root = Xml.Element(
            "svg",
            {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width} {height}", "role": "img"},
        )
        Xml.SubElement(self._root, "title").text = title
        style = Xml.SubElement(self._root, "style")
        style.text = f"text{{font-family:system-ui,sans-serif;font-size:13px;fill:{INK}}}.m{{text-anchor:middle}}"
        style.text += ".s{font-size:8px}.c{font-family:ui-monospace,monospace}.b{font-weight:600}"
        self.box(0, 0, width, height, PAPER, edge="none", radius=8)

    def box(self, x: float, y: float, w: float, h: float, fill: str, *, edge: str = INK, radius: float = 0) -> None:
        """A rectangle from its upper left corner."""
        attributes = {"x": x, "y": y, "width": w, "height": h, "rx": radius}
        self._put("rect", attributes, fill=fill, stroke=edge)

    def grid(self, x: int, y: int, cells: list[list[tuple[int, str]]]) -> None:
        """Rows of cells of 24 x 19 from the upper left corner, each the index of its colour in `RANKS` and a text."""
        places = [(x + 24 * j, y + 19 * i, cell[0]) for i, row in enumerate(cells) for j, cell in enumerate(row)]
        for colour, fill in enumerate(RANKS):
            shapes = "".join(f"M{left} {top}h24v19h-24z" for left, top, its in places if its == colour)
            self._put("path", {}, d=shapes, fill=fill, stroke=FAINT)
        for i, row in enumerate(cells):
            line = self._put("text", {"y": y + 19 * i + 13}, **{"class": "m s"})
            for j, (_, text) in enumerate(row):
                Xml.SubElement(line, "tspan", {"x": _number(x + 24 * j + 12)}).text = text

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """One line of text on its baseline; `kind` lists classes: m middle, s small, c code, b bold."""
        element = self._put("text", {"x": x, "y": y}, **({"class": kind} if kind else {}))
        element.text = text

    def path(
        self, points: list[tuple[float, float]], *, arrow: bool = False, edge: str = INK, width: float = 1
    ) -> None:
        """A line through points, with a head at its end if asked for."""
        steps = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._put("polyline", {}, points=steps, fill="none", stroke=edge, **{"stroke-width": _number(width)})
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            turn = math.atan2(y1 - y0, x1 - x0)
            head = [(x1, y1), *((x1 - 7 * math.cos(turn + a), y1 - 7 * math.sin(turn + a)) for a in (0.45, -0.45))]
            self._put("polygon", {}, points=" ".join(f"{_number(x)},{_number(y)}" for x, y in head), fill=edge)

    def ticks(self, lines: Iterable[tuple[tuple[float, float], tuple[float, float]]]) -> None:
        """Many short lines in one shape, each from a point to a point."""
        steps = ("M" + " ".join(_number(number) for point in line for number in point) for line in lines)
        self._put("path", {}, d="".join(steps), stroke=INK)

    def arc(self, centre: tuple[float, float], radius: float, first: float, last: float, edge: str) -> None:
        """A thick arc between two turns in [0, 1), clockwise from the top."""
        angles = np.linspace(first, last, 12)
        self.path([_on_circle(centre, radius, turn) for turn in angles], edge=edge, width=6)

    def svg(self) -> str:
        """The file's content."""
        for element in self._root:
            element.tail = "\n"
        return Xml.tostring(self._root, encoding="unicode").replace(" />", "/>") + "\n"

    def _put(self, tag: str, numbers: dict[str, float], **words: str) -> Xml.Element:
        return Xml.SubElement(self._root, tag, {k: _number(v) for k, v in numbers.items() if v or k != "rx"} | words)


def life_of_a_weight() -> str:
    """From a word of a file to a product: one weight's way, with its numbers."""
    words = (np.arange(K3.tile_words16, dtype=np.uint32) * 40503 + 12345 & 0xFFFF).astype(np.uint16)
    position = 5
    state = int(unpack_states(words.view(np.int16), K3)[position])
    value = float(get_codebook("mul1").table[state])
    end = int(K3.ends()[position])
    steps = (
        ("file", f"{K3.tile_words16} words of a tile", " ".join(f"{word:04X}" for word in words[:3]) + " ..."),
        ("ring", f"bits {end - STATE_BITS} to {end - 1}", f"{state:016b}"),
        ("state", f"of position {position}", f"0x{state:04X}"),
        ("codebook mul1", "an exact fp16 number", str(value)),
        ("tile", f"row {ROW[position]}, column {COLUMN[position]}", f"a {TILE} x {TILE} part of W_hat"),
        ("rotations", "of the input, of the output", "suh, H ... H, svh"),
        ("layer", "routes, activation, sum", "y = sum of w (x W)"),
    )
    sheet = Sheet(900, 256, "The life of a weight: from a word of a file to a product")
    places = [(20 + 220 * column, 44) for column in range(4)] + [(680 - 220 * column, 160) for column in range(3)]
    for (x, y), (name, what, number) in zip(places, steps, strict=True):
        sheet.box(x, y, 200, 66, RANKS[0] if y < 100 else RANKS[1], radius=6)
        sheet.text(x + 100, y + 19, name, "m b")
        sheet.text(x + 100, y + 38, what, "m")
        sheet.text(x + 100, y + 57, number, "m c")
    for (x, y), (u, v) in pairwise(places):
        if y == v:
            begin, stop = (x + 200, u) if u > x else (x, u + 200)
            sheet.path([(begin, y + 33), (stop, y + 33)], arrow=True)
        else:
            sheet.path([(x + 100, y + 66), (u + 100, v)], arrow=True)
    sheet.text(20, 28, "On a CPU, bit for bit (trellis-format); the same bits in a kernel's registers", "b")
    sheet.text(20, 246, "In float16 operands and float32 sums; the float64 reference is the truth", "b")
    return sheet.svg()


def tile_and_ring() -> str:
    """The ring of a tile at K = 3 with the windows of three positions, and where positions lie in the tile."""
    sheet = Sheet(900, 400, "The ring of a tile and the places of its positions")
    centre, radius = (190.0, 205.0), 130.0
    sheet.text(20, 26, f"A ring of 256 K = {K3.ring_bits} bits; K = {K3}", "b")
    turns = [int(K3.ends()[position]) / K3.ring_bits for position in range(0, TILE_WEIGHTS, 8)]
    sheet.ticks((_on_circle(centre, radius - 4, turn), _on_circle(centre, radius + 4, turn)) for turn in turns)
    sheet.path([_on_circle(centre, radius, step / 96) for step in range(97)])
    for place, (position, colour) in enumerate(((0, ACCENT), (1, "#00897b"), (128, "#ef6c00"))):
        end = int(K3.ends()[position])
        first, last = (end - STATE_BITS) / K3.ring_bits, end / K3.ring_bits
        sheet.arc(centre, radius - 14 - 9 * place, first, last, colour)
        x, y = centre[0], centre[1] - 20 + 22 * place
        sheet.path([(x - 88, y - 4), (x - 66, y - 4)], edge=colour, width=6)
        span = f"{(end - STATE_BITS) % K3.ring_bits} to {end - 1}"
        sheet.text(x - 58, y, f"state {position}: bits {span}")
    sheet.text(20, 374, "A tick is 8 positions. A state is 16 bits; the first reach back.")
    sheet.text(420, 26, "Where the 256 positions lie in the tile", "b")
    rows = POSITION.reshape(TILE, TILE).tolist()
    sheet.grid(440, 52, [[(position // 8 % len(RANKS), str(position)) for position in row] for row in rows])
    sheet.text(440, 48, "output channels", "s")
    sheet.text(420, 374, "Positions 8 L to 8 L + 7, in one colour, are lane L of a warp.")
    return sheet.svg()


def extents_at_tp9() -> str:
    """Who holds which slots of Kimi-K3's intermediate axis on nine ranks, in its first three layers."""
    slots, unit = KIMI_CHANNELS // SLOT, 8.6
    sheet = Sheet(900, 270, f"Extents of {slots} slots over {TP} ranks, with a barrier in the middle")
    left = 68.0
    sheet.text(20, 26, f"{KIMI_CHANNELS} channels = {slots} slots of {SLOT}, over {TP} ranks", "b")
    for block in range(slots // BLOCK_SLOTS):
        sheet.box(left + block * BLOCK_SLOTS * unit, 44, BLOCK_SLOTS * unit, 16, PAPER, edge=INK)
        sheet.text(left + (block + 0.5) * BLOCK_SLOTS * unit, 55, str(block), "m s")
    sheet.text(20, 56, "block")
    for layer in range(3):
        y = 76 + 46 * layer
        sheet.text(20, y + 24, f"layer {layer}", "")
        for rank, extent in enumerate(balanced_extents(KIMI_CHANNELS, TP, layer)):
            x, w = left + extent.first_slot * unit, extent.slot_count * unit
            sheet.box(x, y, w, 38, RANKS[rank], edge=INK)
            sheet.text(x + w / 2, y + 16, f"rank {rank}", "m b")
            sheet.text(x + w / 2, y + 31, f"{extent.slot_count} slots", "m")
    middle = left + KIMI_BARRIER * unit
    sheet.path([(middle, 66), (middle, 220)], edge="#c62828", width=2)
    sheet.text(middle, 236, f"barrier at slot {KIMI_BARRIER}: no share crosses it", "m")
    sheet.text(20, 258, "A share is whole blocks of 128 channels; who holds which rotates, so all ranks hold alike.")
    return sheet.svg()


PICTURES = {
    "life-of-a-weight.svg": life_of_a_weight,
    "tile-and-ring.svg": tile_and_ring,
    "extents-tp9.svg": extents_at_tp9,
}
"""What draws each file."""


def draw(folder: Path) -> Iterator[Path]:
    """Write every picture into a folder."""
    for name, make in PICTURES.items():
        path = folder / name
        path.write_text(make(), encoding="utf-8")
        yield path


def _on_circle(centre: tuple[float, float], radius: float, turn: float) -> tuple[float, float]:
    return centre[0] + radius * math.sin(2 * math.pi * turn), centre[1] - radius * math.cos(2 * math.pi * turn)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


if __name__ == "__main__":
    for written in draw(Path(__file__).parent):
        print(f"{written.name}: {written.stat().st_size} bytes")
