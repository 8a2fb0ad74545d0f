"""Holds tables to their receipts: what the repository shows is what its receipts say, byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from receipt_samples import COMMIT, layer_row, make_receipt, op_row, preparation
from trellis_moe.errors import MoeValueError
from trellis_moe.receipts.peers import Peer, PeerRow
from trellis_moe.receipts.schema import Skipped
from trellis_moe.receipts.store import Published, publish
from trellis_moe.receipts.tables import TABLES, Content, fill, load_content, update_tables

ROOT = Path(__file__).resolve().parents[3]
MIB = 1 << 20
COPY, PREPARED = preparation("1 GB layer", 64 * MIB, share=0.84, host=70 * MIB, device=MIB)
RECEIPT = make_receipt(
    [
        layer_row(8, 206_000),
        layer_row(8, 150_000, arithmetic="bytes"),
        layer_row(8, 900_000, contender="bf16 grouped GEMM", arithmetic="none"),
        layer_row(8, 100_000, io_dtype="bfloat16"),
        layer_row(1024, 1_200_000),
        op_row("pack_routes", "128 routes, 128 experts, blocks of 16, stable", 4_300),
        PREPARED,
    ],
    ceilings=[COPY],
    skipped=(Skipped(what="a | layer", why="too | long"),),
)
PEER = Peer(
    schema="trellis-moe/peer",
    schema_version=1,
    contender="exllamav3 1.0",
    source="its package",
    method="median",
    gpu="NVIDIA H200",
    torch="2.11",
    date="2026-01-31",
    rows=(PeerRow(geometry="GLM-4.5-Air", codebook="mul1", k="3", tokens=8, ms=0.45),),
)
CONTENT = Content((Published("nvidia-h200", "all", RECEIPT),), (PEER,), ("nvidia-h200/layers.svg",))


def marked(name: str, text: str = "") -> str:
    return f"# A page\n\n<!-- receipts {name}: begin -->\n{text}<!-- receipts {name}: end -->\n\nMore.\n"


def cells(name: str, content: Content = CONTENT) -> list[list[str]]:
    """The rows of a table below its header."""
    return [[cell.strip() for cell in line[1:-1].split(" | ")] for line in TABLES[name](content).splitlines()[2:]]


def test_tables_of_the_repository_are_those_of_its_receipts() -> None:
    assert update_tables(ROOT, write=False) == []
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs/benchmarks/README.md").read_text()
    assert all(f"<!-- receipts {name}: begin -->" in shown for name in TABLES)


def test_the_short_table_has_the_fastest_and_what_others_take() -> None:
    assert cells("measured") == [
        ["GLM-4.5-Air, K=3 mul1", "8", "0.150", "bytes", "0.450 (3.0 x)", "0.900 (6.0 x)"],
        ["GLM-4.5-Air, K=3 mul1", "1,024", "1.200", "exact", "-", "-"],
    ]


def test_figures_are_met_or_not_or_not_measured() -> None:
    rows = {row[0]: row[1:] for row in cells("few-tokens")}
    assert rows["GLM-4.5-Air K=3 mul1, 8 tokens"] == ["0.155 ms", "0.150 ms (bytes)", "met"]
    assert rows["GLM-4.5-Air K=3 mul1, 1 tokens"] == ["0.035 ms", "-", "not measured"]
    assert {row[0]: row[1:] for row in cells("many-tokens")}["GLM-4.5-Air K=3 mul1, 1024 tokens"][2] == "not met"
    assert ["1 GB layer, bound 64 MiB, of a pinned copy", "80%", "84%, 42.0 GB/s", "met"] in cells("preparation")
    assert ["pack_routes, 128 routes, 128 experts, blocks of 16, stable", "6 us", "4.3 us", "met"] in cells("ops")


def test_the_summary_counts_every_figure() -> None:
    rows = {row[0]: list(map(int, row[1:])) for row in cells("summary")}
    assert rows["few tokens"][0] == 1
    assert rows["many tokens"][1] == 1
    assert rows["ranks"] == [0, 0, 4]
    assert rows["preparation"][0] == 3  # rate and both peaks


def test_every_row_of_a_layer_has_spread_error_and_ratios() -> None:
    made = TABLES["layers"](CONTENT)
    heading, _, table = made.partition("\n\n")
    assert heading == "#### GLM-4.5-Air, K=3 mul1"
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in table.splitlines()[2:]]
    assert [row[1] for row in rows] == [
        "exact, moe_small", "bytes, moe_small", "bf16 grouped GEMM", "exact, moe_small, bfloat16", "exact, moe_small",
    ]  # fmt: skip
    assert rows[0][2:] == ["206.0", "201.9 to 210.1", "1e-04", "0%", "-", "-"]
    assert rows[4][0] == "1,024"


def test_each_layer_has_a_table_and_what_is_unusual_is_said() -> None:
    rows = [layer_row(8, 206_000, mode="eager"), layer_row(8, 9_000, k="4"), layer_row(1, 9_000, contender="torch")]
    made = TABLES["layers"](Content((Published("nvidia-h200", "all", make_receipt(rows)),), ()))
    assert made.count("#### GLM-4.5-Air") == made.count("| tokens | what |") == 2
    assert "| 8 | exact, moe_small, eager |" in made
    assert "| 1 | torch, exact, moe_small |" in made


def test_receipts_say_where_they_come_from() -> None:
    (row,) = cells("provenance")
    assert row[0] == "[nvidia-h200/all.json](nvidia-h200/all.json)"
    assert row[2] == f"`{COMMIT[:12]}`"
    assert row[3] == "1 x NVIDIA H200, driver 580.1"
    assert row[5] == "1980 / 3201 MHz, 120 W, 41 C; 1980 / 3201 MHz, 120 W, 41 C"
    assert cells("skipped") == [["all", "a / layer", "too / long"]]
    assert cells("peers") == [["exllamav3 1.0", "NVIDIA H200, torch 2.11, 2026-01-31", "its package", "median"]]
    assert ["device copy", "NVIDIA H200", "4000 GB/s", "1.0 to 1.0"] in cells("ceilings")


def test_drawings_are_shown_where_there_are_any() -> None:
    title = "Milliseconds of a layer over tokens, nvidia-h200"
    assert TABLES["plots"](CONTENT) == f"![{title}](nvidia-h200/layers.svg)"
    assert TABLES["layer-plot"](CONTENT) == f"![{title}](docs/benchmarks/nvidia-h200/layers.svg)"


@pytest.mark.parametrize("name", TABLES)
def test_without_receipts_a_table_says_so(name: str) -> None:
    made = TABLES[name](Content((), ()))
    assert made
    assert "| met |" not in made.replace("| figures | met |", "")


def test_only_what_lies_between_the_marks_changes() -> None:
    made = fill(marked("skipped", "stale\n"), CONTENT)
    assert made == marked("skipped", TABLES["skipped"](CONTENT) + "\n")
    assert fill(made, CONTENT) == made


def test_an_unknown_table_is_refused() -> None:
    with pytest.raises(MoeValueError, match="no table 'speed'"):
        fill(marked("speed"), CONTENT)


def test_a_table_that_differs_from_its_receipt_is_found_and_made_anew(tmp_path: Path) -> None:
    benchmarks = tmp_path / "docs" / "benchmarks"
    publish([("all", RECEIPT)], benchmarks)
    (tmp_path / "README.md").write_text("nothing is marked\n")
    page = benchmarks / "README.md"
    page.write_text(marked("measured"))
    assert update_tables(tmp_path, write=False) == [page]
    assert update_tables(tmp_path) == [page]
    before = page.read_bytes()
    assert update_tables(tmp_path) == []
    assert page.read_bytes() == before
    page.write_text(page.read_text().replace("0.150", "0.149"))
    assert update_tables(tmp_path, write=False) == [page]


def test_a_later_receipt_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    later = make_receipt([layer_row(8, 180_000)], created="2026-02-01T12:00:00Z")
    publish([("first", later), ("second", RECEIPT)], tmp_path)
    content = load_content(tmp_path)
    assert [each.name for each in content.published] == ["second", "first"]
    assert cells("measured", content)[0][2:4] == ["0.180", "exact"]
