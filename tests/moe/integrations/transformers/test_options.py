"""Holds options to their context: a load follows those it was given, and nothing after it does."""

from __future__ import annotations

from typing import Any

import pytest

from trellis_moe.errors import MoeTypeError, MoeValueError
from trellis_moe.integrations.transformers.options import (
    TrellisOptions,
    current_options,
    load_model,
    using_options,
)

GIVEN = TrellisOptions(max_tokens=7)


def test_options_last_as_long_as_their_context() -> None:
    assert current_options() == TrellisOptions()
    with using_options(GIVEN):
        assert current_options() is GIVEN
        with pytest.raises(MoeValueError), using_options(TrellisOptions(max_tokens=9)):
            TrellisOptions(max_tokens=-current_options().max_tokens)
        assert current_options() is GIVEN
    assert current_options() == TrellisOptions()


def test_a_load_passes_its_arguments_on_and_its_options_round() -> None:
    class Auto:
        @staticmethod
        def from_pretrained(path: str, **arguments: Any) -> tuple[object, ...]:
            return path, arguments, current_options()

    assert load_model("there", GIVEN, auto_class=Auto, dtype="auto") == ("there", {"dtype": "auto"}, GIVEN)
    assert load_model("there", auto_class=Auto) == ("there", {}, TrellisOptions())


@pytest.mark.parametrize("name", ["max_tokens", "scratch_bytes", "compile_jobs"])
def test_numbers_are_checked(name: str) -> None:
    with pytest.raises(MoeValueError, match=f"{name} must be positive, got 0"):
        TrellisOptions(**{name: 0})
    with pytest.raises(MoeTypeError, match=f"{name} must be an int, got float"):
        TrellisOptions(**{name: 1.5})
