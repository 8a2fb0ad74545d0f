"""Holds the keys of the many-token kernels to their rules, and their memory to the limit of a thread block."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from trellis_format.activations import Activation
from trellis_format.codebooks import CODEBOOKS, EXL3_CODEBOOKS
from trellis_format.errors import FormatValueError
from trellis_format.rates import ALL_RATES
from trellis_kernels.cute.archs import ARCHS
from trellis_kernels.cute.prefill_key import (
    BLOCK_ROWS_MOST,
    ENGINES,
    EPILOGUES,
    MIDDLE_ROWS_MOST,
    MIDDLE_WIDTH_MOST,
    ROW_UNIT,
    SHARED_LIMIT,
    SHORT_ROWS_MOST,
    STASH_NBYTES,
    TABLE_BYTES,
    THREAD_BLOCKS_MOST,
    PrefillGemmKey,
    PrefillImageKey,
    PrefillMiddleKey,
    PrefillReduceKey,
    PrefillScheduleKey,
    PrefillShortKey,
    block_capacity,
    engine_for,
    engines_for,
    image_nbytes,
    info_table,
    prefill_keys,
)
from trellis_kernels.cute.registry import registered_keys
from trellis_kernels.errors import KernelTypeError, KernelValueError

ROWS = PrefillGemmKey("sm_90a", "mul1", (6,))
JOIN = PrefillGemmKey("sm_90a", "mul1", (6, 8), "join", Activation("silu"), biased=(False, False))
ADD = PrefillGemmKey("sm_90a", "mul1", (6,), "add", out_dtype="float16", weight_dtype="float32")
CHANGES = [
    (ADD, {"out_dtype": "bfloat16"}),
    (ADD, {"weight_dtype": "bfloat16"}),
    (ROWS, {"codebook": "mcg"}),
    (ROWS, {"half_bits": (8,)}),
    (ROWS, {"epilogue": "down"}),
    (ROWS, {"biased": (True,)}),
    (ROWS, {"out_dtype": "float16"}),
    (JOIN, {"half_bits": (8, 6)}),
    (JOIN, {"activation": Activation("situ")}),
    (JOIN, {"activation": Activation("silu", limit=7.0)}),
    (JOIN, {"biased": (False, True)}),
    (PrefillImageKey("sm_90a", "float16", 1), {"arch": "sm_80"}),
    (PrefillImageKey("sm_90a", "float16", 1), {"in_dtype": "bfloat16"}),
    (PrefillImageKey("sm_90a", "float16", 1), {"images": 2}),
    (PrefillReduceKey("sm_90a", "float32", "bfloat16"), {"weight_dtype": "float16"}),
    (PrefillReduceKey("sm_90a", "float32", "bfloat16"), {"out_dtype": "float16"}),
    (PrefillScheduleKey("sm_90a"), {"arch": "sm_80"}),
    (PrefillScheduleKey("sm_90a"), {"block_rows": 128}),
]


@pytest.mark.parametrize(("key", "change"), CHANGES, ids=[f"{key.kernel}-{change}" for key, change in CHANGES])
def test_each_field_changes_the_key(key, change) -> None:
    changed = replace(key, **change)
    assert changed != key
    assert {key, changed, replace(key)} == {key, changed}


@pytest.mark.parametrize("key", [ROWS, JOIN, *dict.fromkeys(key for key, _ in CHANGES)], ids=str)
def test_repr_evaluates_back(key) -> None:
    assert eval(repr(key)) == key


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"arch": "sm_80"}, KernelValueError, "sm_90a"),
        ({"codebook": "nosuch"}, FormatValueError, "nosuch"),
        ({"half_bits": (9,)}, FormatValueError, "4.5"),
        ({"half_bits": (6, 6)}, KernelValueError, "got 2 and 1"),
        ({"biased": (False, True)}, KernelValueError, "got 1 and 2"),
        ({"epilogue": "sideways"}, KernelValueError, "sideways"),
        ({"epilogue": "join"}, KernelTypeError, "join"),
        ({"activation": Activation("silu")}, KernelTypeError, "silu"),
        ({"out_dtype": "bfloat16"}, KernelValueError, "bfloat16"),
    ],
)
def test_illegal_keys_are_refused(change, error, says) -> None:
    with pytest.raises(error, match=says):
        replace(ROWS, **change)


@pytest.mark.parametrize(("change", "says"), [({"out_dtype": "float32"}, "float32"), ({"weight_dtype": None}, "None")])
def test_additions_need_dtypes_of_their_terms(change, says) -> None:
    with pytest.raises(KernelValueError, match=says):
        replace(ADD, **change)
    with pytest.raises(KernelValueError, match="weight_dtype 'float32'"):
        replace(ROWS, weight_dtype="float32")


def test_a_half_rate_needs_a_codebook_that_has_it() -> None:
    with pytest.raises(FormatValueError, match="mcg"):
        replace(ROWS, codebook="mcg", half_bits=(5,))


def test_other_keys_refuse_what_they_do_not_know() -> None:
    for build in (
        lambda: PrefillImageKey("sm_90a", "int8", 1),
        lambda: PrefillImageKey("sm_90a", "float16", 3),
        lambda: PrefillReduceKey("sm_90a", "int8", "float16"),
        lambda: PrefillReduceKey("sm_90a", "float32", "int8"),
        lambda: PrefillScheduleKey("sm_1"),
        lambda: PrefillScheduleKey("sm_90a", 100),
    ):
        with pytest.raises(KernelValueError):
            build()


def test_every_pair_of_rates_has_three_stages_within_the_limit() -> None:
    for gate, up in itertools.product(ALL_RATES, repeat=2):
        for biased in (False, True):
            key = replace(JOIN, half_bits=(gate.half_bits, up.half_bits), biased=(biased, False))
            assert key.stages >= (4 if max(gate.bits, up.bits) <= 4 else 3), key
            assert key.dynamic_shared_bytes <= SHARED_LIMIT, key


def test_no_feeding_warp_is_more_than_a_stage_ahead_of_what_it_has_seen_given_back() -> None:
    for gate, up in itertools.product(ALL_RATES, repeat=2):
        key = replace(JOIN, half_bits=(gate.half_bits, up.half_bits))
        assert key.feeders in (1, 2, 4)
        assert key.feeders <= key.stages, "a wait for a phase by its parity would pass two phases early"


@pytest.mark.parametrize("epilogue", ["rows", "down"])
def test_every_rate_has_four_stages_with_one_linear(epilogue: str) -> None:
    for rate in ALL_RATES:
        codebook = next(book.name for book in CODEBOOKS.values() if rate in book.legal_rates)
        key = PrefillGemmKey("sm_90a", codebook, (rate.half_bits,), epilogue)
        assert key.stages >= (4 if rate.bits <= 6 else 3)
        assert key.dynamic_shared_bytes <= SHARED_LIMIT


def test_the_engine_of_a_target_compiles_for_it() -> None:
    for arch in ARCHS:
        key = ENGINES[engine_for(arch, 1000, 256)](arch, "mul1", (6,))
        assert key.passes * key.pass_rows >= key.block_rows
        assert key.dynamic_shared_bytes <= key.shared_limit
    kinds = {kind("sm_90a", "mul1", (6,)) for kind in ENGINES.values()}
    assert len(kinds) == len({str(key) for key in kinds}) == 4


def test_few_rows_of_an_expert_take_short_blocks_where_there_is_wgmma() -> None:
    narrow, wide = MIDDLE_WIDTH_MOST, MIDDLE_WIDTH_MOST + 128
    assert engine_for("sm_90a", SHORT_ROWS_MOST, wide) == "wgmma_short"
    assert engine_for("sm_90a", SHORT_ROWS_MOST + 1, wide) == "wgmma_tall"
    assert engine_for("sm_90a", SHORT_ROWS_MOST + 1, narrow) == "wgmma_middle"
    assert engine_for("sm_90a", MIDDLE_ROWS_MOST + 1, narrow) == "wgmma_tall"
    assert {engine_for(arch, 1, narrow) for arch in ARCHS if arch != "sm_90a"} == {"mma"}
    assert PrefillShortKey.block_rows > SHORT_ROWS_MOST, "segments vary around their average"
    assert PrefillMiddleKey.block_rows > MIDDLE_ROWS_MOST


@pytest.mark.parametrize("width", [MIDDLE_WIDTH_MOST, MIDDLE_WIDTH_MOST + 128])
@pytest.mark.parametrize("most", [0.5, 1, 52, 52.5, 53, 72, 73, 1000])
def test_the_kinds_for_up_to_some_rows_are_those_for_any_fewer(most: float, width: int) -> None:
    steps = [most * part / 1000 for part in range(1, 1001)]
    for arch in ("sm_90a", "sm_80"):
        assert engines_for(arch, most, width) == tuple(dict.fromkeys(engine_for(arch, rows, width) for rows in steps))


def test_products_finish_the_decoding_where_rows_are_few_and_logic_binds() -> None:
    for kind, wanted in ((PrefillShortKey, True), (PrefillMiddleKey, True), (PrefillGemmKey, False)):
        assert kind("sm_90a", "mcg", (6,)).by_products is wanted
        assert kind("sm_90a", "mul1", (6,)).by_products is False


def test_two_thread_blocks_of_short_rows_share_a_multiprocessor_at_every_rate() -> None:
    for gate, up in itertools.product(ALL_RATES, repeat=2):
        for kind in (PrefillShortKey, PrefillMiddleKey):
            half_bits = gate.half_bits, up.half_bits
            key = kind("sm_90a", "mul1", half_bits, "join", Activation("silu"), biased=(True, True))
            assert key.stages >= 2
            assert key.feeders <= key.stages
            assert 2 * (key.dynamic_shared_bytes + 1024) <= 233_472


@pytest.mark.parametrize("kind", ENGINES.values())
def test_gate_of_every_thread_block_has_its_place_in_the_stash(kind) -> None:
    blocks = THREAD_BLOCKS_MOST * kind.resident
    assert blocks * kind("sm_90a", "mul1", (6,)).stash_bytes <= STASH_NBYTES
    assert kind.pass_rows % ROW_UNIT == kind.block_rows % ROW_UNIT == 0


def test_tables_of_codebooks_have_their_bytes() -> None:
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
    from trellis_kernels.cute.table_codebooks import TABLE_CODEBOOKS

    assert {name: tabled.words.nbytes for name, tabled in TABLE_CODEBOOKS.items()} == TABLE_BYTES
    assert PrefillGemmKey("sm_90a", "lut_e4m3", (6,)).law_bytes == TABLE_BYTES["lut_e4m3"]
    assert ROWS.law_bytes == 0


def test_a_law_without_a_gate_takes_one_linear() -> None:
    key = PrefillGemmKey("sm_90a", "mul1", (6,), "join", Activation("relu2"))
    assert (key.gated, key.linears) == (False, 1)
    assert key.rates[0] == key.rates[1]


@pytest.mark.parametrize(
    ("key", "scales", "tables"),
    [
        (ROWS, 0, 0),
        (replace(ROWS, biased=(True,)), 0, 0),
        (replace(ROWS, epilogue="down"), 1, 1),
        (replace(ROWS, epilogue="down", biased=(True,)), 1, 2),
        (replace(ADD, biased=(True,)), 1, 2),
        (JOIN, 3, 3),
        (replace(JOIN, biased=(True, False)), 3, 5),
        (PrefillGemmKey("sm_90a", "mul1", (6,), "join", Activation("relu2"), biased=(True,)), 2, 3),
    ],
)
def test_tables_are_those_of_the_epilogue(key, scales: int, tables: int) -> None:
    assert (key.scale_tables, key.tables) == (scales, tables)
    assert key.info_bytes == info_table(tables)


@pytest.mark.parametrize("counts", [[0, 0, 0], [1, 1, 1], [128, 129, 127], [4096, 0, 3], [255, 256, 257]])
def test_block_capacity_suffices(counts: list[int]) -> None:
    needed = sum(-(-count // BLOCK_ROWS_MOST) for count in counts)
    assert needed <= block_capacity(sum(counts), len(counts))


def test_image_bytes_are_those_of_its_rows() -> None:
    assert image_nbytes(1000, 4096) == 1000 * 4096 * 2


@pytest.mark.parametrize("arch", ARCHS)
def test_registered_keys_have_each_epilogue_and_codebook_under_its_own_name(arch: str) -> None:
    keys = prefill_keys(arch)
    gemms = [key for key in keys if key.kernel == ENGINES[engine_for(arch, 1000, 256)].kernel]
    assert {key.epilogue for key in gemms} == set(EPILOGUES)
    assert {key.codebook for key in gemms} == {*EXL3_CODEBOOKS, *TABLE_BYTES}
    assert len({str(key) for key in keys}) == len(keys)
    assert set(keys) <= set(registered_keys(arch))
