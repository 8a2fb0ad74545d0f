"""Holds the README's support table to the registries."""

from __future__ import annotations

from pathlib import Path

import pytest

from trellis_format.codebooks import CODEBOOKS
from trellis_format.rates import Rate
from trellis_kernels.cute.archs import ARCHS
from trellis_moe.support import TESTED_ON, rates_text, support_table

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
