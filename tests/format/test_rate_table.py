"""Holds the table of rates to the rates it was made of, in every shape."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.rate_table import RateTable
from trellis_format.rates import ALL_RATES, Rate

RATES = st.sampled_from(ALL_RATES)


def rates(*rows: tuple[float, ...]) -> list[list[Rate]]:
    return [[Rate.of(bits) for bits in row] for row in rows]


@given(st.integers(1, 6), st.integers(2, 3), st.data())
def test_a_table_gives_back_every_rate(experts: int, projections: int, data: st.DataObject) -> None:
    few = st.sampled_from(data.draw(st.lists(RATES, min_size=1, max_size=2)))
    rows = [[data.draw(few) for _ in range(projections)] for _ in range(experts)]
    table = RateTable.of(rows)
    table.check_shape(experts, projections)
    assert [[table.rate(e, p) for p in range(projections)] for e in range(experts)] == rows
    assert table.distinct() == tuple(sorted({rate for row in rows for rate in row}))
    assert table.is_uniform == (len(table.distinct()) == 1)
    assert eval(repr(table)) == table
    dense = table.rate_bytes()
    assert dense.dtype == np.uint8
    assert {int(byte) >> 4 for byte in dense.flat} == {int(byte) & 15 for byte in dense.flat}
    assert {Rate.from_nibble(int(byte) & 15) for byte in dense.flat} == set(table.distinct())


@pytest.mark.parametrize(
    ("rows", "half_bits", "shape"),
    [
        (rates((3, 3, 3), (3, 3, 3)), ((6,),), (1,)),
        (rates((3, 3, 3), (4, 4, 4)), ((6,), (8,)), (2,)),
        (rates((3, 3, 4), (3, 3, 4)), ((6, 6, 8),), (1, 3)),
        (rates((3, 3, 3), (3, 2.5, 3)), ((6, 6, 6), (6, 5, 6)), (2, 3)),
        (rates((1, 2)), ((2, 4),), (1, 2)),
    ],
)
def test_the_shortest_form_is_kept(rows: list[list[Rate]], half_bits: tuple, shape: tuple) -> None:
    table = RateTable.of(rows)
    assert table.half_bits == half_bits
    assert table.rate_bytes().shape == shape


def test_rate_bytes_are_the_nibble_twice() -> None:
    table = RateTable.of(rates((1, 2.5, 4), (8, 1.5, 3.5)))
    assert [f"{byte:02X}" for byte in table.rate_bytes().flat] == ["11", "AA", "44", "88", "99", "BB"]
    assert RateTable.uniform(Rate.of(3)).rate_bytes().tolist() == [0x33]


def test_uniform_is_one_rate_for_all() -> None:
    table = RateTable.uniform(Rate.of(2.5))
    assert table.is_uniform
    assert table.rate(41, 2) == Rate.of(2.5)
    assert table == RateTable.of(rates((2.5, 2.5, 2.5)))
    table.check_shape(17, 3)


@pytest.mark.parametrize(("experts", "projections"), [(3, 3), (2, 2), (1, 3)])
def test_a_table_of_other_size_does_not_fit(experts: int, projections: int) -> None:
    table = RateTable.of(rates((1, 2, 3), (4, 5, 6)))
    table.check_shape(2, 3)
    with pytest.raises(FormatValueError, match=f"2 x 3 does not fit {experts} experts x {projections} projections"):
        table.check_shape(experts, projections)


@pytest.mark.parametrize("half_bits", [(), ((),), ((6,), ()), ((6, 6), (6,))])
def test_empty_and_ragged_tables_are_refused(half_bits: tuple) -> None:
    with pytest.raises(FormatValueError, match="at least one row, and rows of one length"):
        RateTable(half_bits)


@pytest.mark.parametrize("half_bits", [[(6,)], ([6],), "66", 6])
def test_a_table_is_a_tuple_of_tuples(half_bits: object) -> None:
    with pytest.raises(FormatTypeError, match="tuple of tuples"):
        RateTable(half_bits)  # type: ignore[arg-type]


def test_cells_are_legal_rates() -> None:
    with pytest.raises(FormatValueError, match=r"K = 4\.5 is not legal"):
        RateTable(((6, 9),))
    with pytest.raises(FormatTypeError, match="must be an int, got float"):
        RateTable(((6.0,),))  # type: ignore[arg-type]
    with pytest.raises(FormatValueError, match="at least one row"):
        RateTable.of([])


@pytest.mark.parametrize(
    ("rate", "half_bits"),
    [
        ([0x33], ((6,),)),
        ([0x33, 0x33], ((6,),)),
        ([0x99, 0x44, 0x88], ((3,), (8,), (16,))),
        ([[0x33, 0x33, 0x33], [0x44, 0x44, 0x44]], ((6,), (8,))),
        ([[0x11, 0xAA, 0x44], [0xBB, 0x22, 0x77]], ((2, 5, 8), (7, 4, 14))),
    ],
)
def test_bytes_are_read_as_the_shortest_table(rate: list[object], half_bits: tuple[tuple[int, ...], ...]) -> None:
    assert RateTable.from_bytes(np.array(rate, dtype=np.uint8)) == RateTable(half_bits)


def test_bytes_that_are_no_rates_are_named_by_place() -> None:
    with pytest.raises(FormatValueError, match=r"rate\[1, 2\]: rate byte 0x24 .*symmetric"):
        RateTable.from_bytes(np.array([[0x33] * 3, [0x33, 0x33, 0x24]], dtype=np.uint8))
    with pytest.raises(FormatValueError, match=r"rate\[0\]: rate byte 0x0C: rate nibble 0 is illegal"):
        RateTable.from_bytes(np.array([0x0C], dtype=np.uint8))
    with pytest.raises(FormatTypeError, match="rate must be uint8, got int16"):
        RateTable.from_bytes(np.array([0x33], dtype=np.int16))  # type: ignore[arg-type]
    for shape in ((), (0,), (1, 1, 1)):
        with pytest.raises(FormatValueError, match=r"rate must be .* got shape"):
            RateTable.from_bytes(np.full(shape, 0x33, dtype=np.uint8))


def test_bytes_written_are_read_back() -> None:
    for table in (((6,),), ((3,), (8,)), ((2, 5, 8), (7, 4, 14)), ((2, 5, 8),)):
        assert RateTable.from_bytes(RateTable(table).rate_bytes()) == RateTable(table)
