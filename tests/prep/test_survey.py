"""Holds the choice of layers, and of this rank's share of each."""

from __future__ import annotations

from pathlib import Path

import pytest

from prep.samples import open_layer, random_layer, write_checkpoint
from trellis_format.checkpoint import open_checkpoint
from trellis_prep import PrepValueError, plan_preparation
from trellis_prep.survey import open_layers, parse_layers, rank_share, read_sample, select_layers


@pytest.mark.parametrize(
    ("text", "layers"), [("3", [3]), ("0-3,7", [0, 1, 2, 3, 7]), ("7, 1-2,2", [1, 2, 7]), ("5-5", [5])]
)
def test_selections(text: str, layers: list[int]) -> None:
    assert list(parse_layers(text)) == layers


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1,,2", "1-2-3", "100000", "0-9999999999", "\u0663"])
def test_what_is_no_selection_is_refused(text: str) -> None:
    with pytest.raises(PrepValueError, match=r"range of layers|must ascend"):
        parse_layers(text)


@pytest.mark.parametrize("text", ["0-" + "9" * 12, "1" * 5000])
def test_an_index_of_any_length_is_told_the_highest(text: str) -> None:
    with pytest.raises(PrepValueError, match=r"must ascend and be at most 99999"):
        parse_layers(text)
    assert parse_layers("0" * 5000 + "7") == (7,)


def test_layers_are_those_with_experts(checkpoint_path: Path) -> None:
    with open_checkpoint(checkpoint_path) as checkpoint:
        keys = select_layers(checkpoint, None)
        for key, source, weights in open_layers(checkpoint, keys):
            assert select_layers(checkpoint, [key.index]) == (key,)
            assert weights.intermediate_scales.shape[0] == source.geometry.num_experts
        known = ", ".join(str(key.index) for key in keys)
        with pytest.raises(PrepValueError, match=f"layers 98, 99 have no experts; those that have: {known}"):
            select_layers(checkpoint, [99, keys[0].index, 98])


def test_share_is_the_even_one() -> None:
    source, _ = random_layer()
    assert [rank_share(source, rank, 2).width for rank in range(2)] == [256, 128]


def test_sample_reads_one_experts_share(tmp_path: Path) -> None:
    checkpoint, source, weights = open_layer(write_checkpoint(tmp_path, random_layer()))
    plan = plan_preparation(source, extent=rank_share(source, 1, 3))
    with checkpoint:
        before = checkpoint.bytes_read
        nbytes, seconds = read_sample(plan, weights)
        assert nbytes == checkpoint.bytes_read - before == source.expert_code_bytes(0, plan.layout.extent)
    assert seconds > 0
