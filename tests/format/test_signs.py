"""Holds sign patterns to their published draws, to an independent generator, and to being cut, never drawn again."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trellis_format.errors import FormatTypeError, FormatValueError
from trellis_format.extent import TrellisExtent
from trellis_format.signs import PATTERNS, SignAxis, check_patterns, expert_signs, pattern_seed, pattern_signs

FROZEN = "1c8d4453d21b51eab567a73606fc4009e939b5d0c544731814498c82f0da09fa"
DRAWS = {
    (1, SignAxis.PRE): (0x257194ED78877044, (2252575415, 1545903847, 1001089879, 1195329518), "+++-+-++++-+-+-+"),
    (1, SignAxis.POST): (0x60D94372FD52177F, (1724661546, 1461978200, 2669033714, 182435460), "-----+-+-++++---"),
    (7, SignAxis.PRE): (0x21ACFB5D2EF4267A, (3638650398, 439849004, 2386435285, 78017), "--+++---+----+-+"),
    (7, SignAxis.POST): (0x5D14A9E2B3BECDB5, (2291073432, 3857977901, 138459614, 965196134), "-+------+-++++--"),
}


class Twister:
    """MT19937 as its authors describe it, initialised by one integer; written here so that the test shares no code."""

    def __init__(self, seed: int) -> None:
        self.state = [seed]
        for index in range(1, 624):
            before = self.state[-1]
            self.state.append(1812433253 * (before ^ before >> 30) + index & 0xFFFFFFFF)
        self.index = 624

    def word(self) -> int:
        if self.index == 624:
            for place in range(624):
                joined = self.state[place] & 0x80000000 | self.state[(place + 1) % 624] & 0x7FFFFFFF
                odd = 0x9908B0DF if joined & 1 else 0
                self.state[place] = self.state[(place + 397) % 624] ^ joined >> 1 ^ odd
            self.index = 0
        word = self.state[self.index]
        self.index += 1
        word ^= word >> 11
        word ^= word << 7 & 0x9D2C5680
        word ^= word << 15 & 0xEFC60000
        return word ^ word >> 18


@pytest.mark.parametrize("place", DRAWS, ids=str)
def test_published_draws(place: tuple[int, SignAxis]) -> None:
    seed, words, shown = DRAWS[place]
    assert pattern_seed(*place) == seed
    twister = Twister(seed & 0xFFFFFFFF)
    assert tuple(twister.word() for _ in range(4)) == words
    assert "".join("+" if sign > 0 else "-" for sign in pattern_signs(*place, 3072)[:16]) == shown


@pytest.mark.parametrize("axis", SignAxis)
@pytest.mark.parametrize("pattern", range(PATTERNS))
def test_signs_are_those_of_an_independent_generator(pattern: int, axis: SignAxis) -> None:
    signs = pattern_signs(pattern, axis, 1408)
    assert signs.shape == (1408 * (2 if axis == 1 else 1),)
    twister = Twister((0x6A09E667F3BCC909 * pattern + 0xBB67AE8584CAA73B * int(axis)) % 2**63 % 2**32)
    expected = [2 * (twister.word() & 1) - 1 if pattern else 1 for _ in signs]
    assert signs.tolist() == expected


def test_frozen_vector() -> None:
    rows = [np.concatenate([pattern_signs(pattern, axis, 512) for axis in SignAxis]) for pattern in range(PATTERNS)]
    stored = np.stack(rows).astype("<f2").tobytes()
    assert len(stored) == 8 * 1536 * 2
    assert hashlib.sha256(stored).hexdigest() == FROZEN


@given(st.integers(0, 23), st.integers(1, 24), st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_a_share_is_cut_out_of_the_whole_draw(first: int, blocks: int, patterns: list[int]) -> None:
    blocks = min(blocks, 24 - first)
    share = TrellisExtent(global_intermediate_size=3072, first_slot=4 * first, slot_count=4 * blocks)
    table = np.array(patterns, dtype=np.uint8)
    for axis, width in ((SignAxis.PRE, 256), (SignAxis.POST, 128)):
        signs = expert_signs(table, axis, share)
        assert signs.shape == (len(patterns), width * blocks)
        for row, pattern in zip(signs, patterns, strict=True):
            whole = pattern_signs(pattern, axis, 3072)
            assert np.array_equal(row, whole[width * first : width * (first + blocks)])


def test_a_draw_of_local_length_would_be_another_one() -> None:
    second = TrellisExtent(global_intermediate_size=1024, first_slot=16, slot_count=16)
    cut = expert_signs(np.array([5], np.uint8), SignAxis.POST, second)[0]
    assert not np.array_equal(cut, pattern_signs(5, SignAxis.POST, 512))


def test_signs_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        pattern_signs(3, SignAxis.PRE, 128)[0] = 1


@pytest.mark.parametrize("pattern", [-1, 8, 255])
def test_patterns_are_eight(pattern: int) -> None:
    with pytest.raises(FormatValueError, match=f"sign pattern {pattern} does not exist; patterns are 0..7"):
        pattern_signs(pattern, SignAxis.PRE, 128)


def test_the_first_bad_expert_is_named() -> None:
    with pytest.raises(FormatValueError, match=r"sign_pattern of expert 2 is 9; patterns are 0\.\.7"):
        check_patterns(np.array([0, 7, 9, 8], np.uint8), 4)
    check_patterns(np.array([0, 7, 6, 5], np.uint8), 4)


@pytest.mark.parametrize(
    "patterns", [np.zeros(3, np.int64), np.zeros(2, np.uint8), np.zeros((3, 1), np.uint8), np.zeros(3, np.float16)]
)
def test_patterns_have_one_byte_an_expert(patterns: np.ndarray) -> None:
    with pytest.raises(FormatValueError, match=r"sign_pattern must be uint8 \[3\], one for each expert, got"):
        check_patterns(patterns, 3)


def test_patterns_are_an_array() -> None:
    with pytest.raises(FormatTypeError, match="sign_pattern must be an array, got list"):
        check_patterns([0, 1, 2], 3)  # type: ignore[arg-type]
