"""Holds the README's support table to the registries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moe.samples import LAWS, make_layer
from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_moe import ActivationSpec, MoeUnsupportedError
from trellis_moe.support import TESTED_ON, check_support, rates_text, support_row, support_table

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_shows_the_table() -> None:
    _, _, rest = README.read_text().partition("<!-- support-table: begin -->\n")
    shown, mark, _ = rest.partition("<!-- support-table: end -->")
    assert mark
    assert shown.strip() == support_table()


def test_every_codebook_and_target_has_its_place() -> None:
    table = support_table()
    assert all(table.count(f"| `{name}` |") == 1 for name in CODEBOOKS)
    assert all(f"`{arch}`" in table for arch in ARCHS)
    assert set(TESTED_ON) <= set(ARCHS)


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (("1", "2", "3"), "1 to 3"),
        (("2", "4"), "2, 4"),
        (("1", "1.5", "2", "2.5"), "1 to 2, 1.5, 2.5"),
    ],
)
def test_rates_read_as_ranges(rates: tuple[str, ...], text: str) -> None:
    assert rates_text([Rate.of(rate) for rate in rates]) == text


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_a_refusal_shows_the_row_of_the_table(codebook: str) -> None:
    row = support_row(codebook)
    cells = [cell.strip() for cell in next(line for line in support_table().splitlines() if f"| `{codebook}` |" in line)
             .strip("|").split("|")]  # fmt: skip
    assert all(cell in row for cell in cells)
    spec = ActivationSpec(nonlinearity=LAWS[0], io_dtype="float16", arithmetic="bytes")
    source = make_layer(codebook=codebook, rates=("5" if codebook == "lut_fp16" else "3",)).source
    check_support(source, replace(spec, arithmetic="exact"))
    if codebook == "mul1":
        check_support(source, spec)
    else:
        with pytest.raises(MoeUnsupportedError, match="arithmetic bytes needs codebook mul1") as caught:
            check_support(source, spec)
        assert row in str(caught.value)
