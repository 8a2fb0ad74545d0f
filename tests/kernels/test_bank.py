"""Holds a bank's views to the words that they must show, at every rate."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kernel_cases import random_bank
from trellis_format.codebooks import get_codebook
from trellis_format.errors import FormatValueError
from trellis_format.rates import ALL_RATES
from trellis_format.tiles import decode_inner
from trellis_kernels import KernelValueError


def test_each_expert_shows_its_own_tiles() -> None:
    bank, weights = random_bank("mul1", list(ALL_RATES), 128, 256)
    assert bank.num_experts == len(ALL_RATES)
    for expert, wanted in enumerate(ALL_RATES):
        tiles, rate = bank.tiles(expert)
        assert rate == wanted
        assert tiles.untyped_storage().data_ptr() == bank.words.untyped_storage().data_ptr()
        decoded = decode_inner(tiles.numpy(), get_codebook("mul1"), rate)
        np.testing.assert_array_equal(decoded.astype(np.float64), weights[expert])


def test_host_places_are_the_device_descriptors() -> None:
    bank, _ = random_bank("mul1", list(ALL_RATES), 128, 128)
    assert tuple(map(tuple, bank.descriptors.tolist())) == bank.places


def test_words_that_end_early_are_refused() -> None:
    bank, _ = random_bank("mcg", [ALL_RATES[-1]], 128, 128)
    short = dataclasses.replace(bank, words=bank.words[:-1])
    with pytest.raises(KernelValueError, match=r"expert 0: words 0\.\.4096 of 4095"):
        short.tiles(0)


def test_illegal_rate_is_refused() -> None:
    bank, _ = random_bank("mcg", [ALL_RATES[-1]], 128, 128)
    with pytest.raises(FormatValueError, match=r"K = 8\.5"):
        dataclasses.replace(bank, places=((0, 17),)).tiles(0)
