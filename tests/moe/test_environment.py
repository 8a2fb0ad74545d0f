"""Holds the environment to its one variable, read once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trellis_moe import MoeValueError
from trellis_moe.environment import REFERENCE_VARIABLE, reference_asked


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    reference_asked.cache_clear()
    yield
    reference_asked.cache_clear()


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_the_reference_backend_is_asked_for_by_one(
    monkeypatch: pytest.MonkeyPatch, value: str | None, asked: bool
) -> None:
    if value is None:
        monkeypatch.delenv(REFERENCE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(REFERENCE_VARIABLE, value)
    assert reference_asked() is asked
    monkeypatch.setenv(REFERENCE_VARIABLE, "0" if asked else "1")
    assert reference_asked() is asked  # what a process began with stays


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REFERENCE_VARIABLE, "yes")
    with pytest.raises(MoeValueError, match="TRELLIS_REFERENCE must be 0 or 1, got 'yes'"):
        reference_asked()
