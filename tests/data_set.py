"""Owns access to the test data: checkpoints on disk and what the peer's kernels gave for them.

It must not import the packages under test.  The set is a folder with `checkpoints/` and `golden/`; `--data DIR` names
another than tests/data, for example the untrimmed one, and tests enumerate whatever is there.  In a conftest.py:

    from data_set import data_set, pytest_generate_tests

and a test asks for `data_set`, or for one of `inner_case`, `states_case`, `linear_case`, `moe_case`, `checkpoint_path`,
and runs once for each of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

__all__ = [
    "DEFAULT_DATA",
    "DataSet",
    "InnerCase",
    "LinearCase",
    "MoeCase",
    "StatesCase",
    "data_set",
    "open_data_set",
    "pytest_generate_tests",
    "sha256",
]

DEFAULT_DATA = Path(__file__).parent / "data"
_Array = npt.NDArray[Any]


def sha256(array: _Array) -> str:
    """SHA-256 of an array's bytes in row-major order, in hexadecimal."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class InnerCase:
    """Random tiles `[8, 8, 16*K] int16` and the SHA-256 of the `[128, 128] float16` weight decoded from them."""

    codebook: str
    bits: float
    trellis: _Array
    weight_sha256: str


@dataclass(frozen=True, eq=False)
class StatesCase:
    """Random tiles `[8, 8, 16*K] int16` and the SHA-256 of their `[8, 8, 256] int16` states."""

    bits: float
    trellis: _Array
    states_sha256: str


@dataclass(frozen=True, eq=False)
class LinearCase:
    """A quantised linear, `x` `[rows, k] float16` and the peer's product `y` `[rows, n] float16`."""

    codebook: str
    bits: float
    trellis: _Array
    suh: _Array
    svh: _Array
    marker: _Array | None
    x: _Array
    y: _Array


@dataclass(frozen=True, eq=False)
class MoeCase:
    """Tokens of one layer of one checkpoint.

    Attributes:
        checkpoint: path of its folder.
        layer: index of the layer.
        batch: tokens of the batch in which the peer computed them; a trimmed set keeps fewer.
        x: `[tokens, hidden] float16`.
        topk_ids: `[tokens, top_k] int64`.
        topk_weights: `[tokens, top_k] float16`.
        y: `[tokens, hidden] float32`, the peer's output; None for layers with shared experts.
        y_float64: `[tokens, hidden] float64`, routed experts on the exact codes; None where it was not computed.
    """

    checkpoint: Path
    layer: int
    batch: int
    x: _Array
    topk_ids: _Array
    topk_weights: _Array
    y: _Array | None
    y_float64: _Array | None


class DataSet:
    """A folder with `checkpoints/` and `golden/`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @functools.cached_property
    def checkpoints(self) -> dict[str, Path]:
        """Folder of each checkpoint by name."""
        return {path.name: path for path in sorted((self.root / "checkpoints").iterdir()) if path.is_dir()}

    @functools.cached_property
    def inner_cases(self) -> dict[str, InnerCase]:
        """`<codebook>.k<K>`: tiles and decoded weights."""
        cases = {}
        for stem, codebook, bits in self._stems(r"inner\.(\w+)\.k([\d.]+)"):
            digest = self._digest(f"{stem}.weight")
            cases[f"{codebook}.k{bits}"] = InnerCase(codebook, float(bits), self._linear[f"{stem}.trellis"], digest)
        return cases

    @functools.cached_property
    def states_cases(self) -> dict[str, StatesCase]:
        """`k<K>`: tiles and their states."""
        cases = {}
        names = {*self._linear, *self._hashes}
        for name in sorted(name for name in names if re.fullmatch(r"states\.k[\d.]*\d", name)):
            rate = name.removeprefix("states.")
            tiles = self._linear.get(f"{name}.trellis", self._linear[f"inner.mul1.{rate}.trellis"])
            cases[rate] = StatesCase(float(rate[1:]), tiles, self._digest(name))
        return cases

    @functools.cached_property
    def linear_cases(self) -> dict[str, LinearCase]:
        """`<codebook>.k<K>.<k>x<n>`: whole linears."""
        cases = {}
        for stem, codebook, bits in self._stems(r"linear\.(\w+)\.k([\d.]+)\.\d+x\d+"):
            part = {name: self._linear[f"{stem}.{name}"] for name in ("trellis", "suh", "svh", "x", "y")}
            marker = self._linear.get(f"{stem}.{codebook}")
            cases[stem.removeprefix("linear.")] = LinearCase(codebook, float(bits), marker=marker, **part)
        return cases

    @functools.cached_property
    def moe_cases(self) -> dict[str, MoeCase]:
        """`<checkpoint>.layer<L>.m<batch>`: tokens of expert layers whose checkpoint is in the set."""
        golden = {}
        for name in ("exl3_moe", "exl3_arch"):
            golden |= load_file(self.root / f"golden/{name}.safetensors")
        cases = {}
        for name in sorted(golden):
            match = re.fullmatch(r"((.+)\.layer(\d+)\.m(\d+))\.x", name)
            if match and match[2] in self.checkpoints:
                part = {key: golden[f"{match[1]}.{key}"] for key in ("x", "topk_ids", "topk_weights")}
                outputs = {key: golden.get(f"{match[1]}.{key}") for key in ("y", "y_float64")}
                path = self.checkpoints[match[2]]
                cases[match[1]] = MoeCase(path, int(match[3]), int(match[4]), **part, **outputs)
        return cases

    def _stems(self, pattern: str) -> Iterator[tuple[str, str, str]]:
        for name in sorted(self._linear):
            match = re.fullmatch(rf"({pattern})\.trellis", name)
            if match:
                yield match[1], match[2], match[3]

    def _digest(self, name: str) -> str:
        return self._hashes[name] if name in self._hashes else sha256(self._linear[name])

    @functools.cached_property
    def _linear(self) -> dict[str, _Array]:
        return load_file(self.root / "golden/exl3_linear.safetensors")

    @functools.cached_property
    def _hashes(self) -> dict[str, str]:
        path = self.root / "golden/hashes.json"
        return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def open_data_set(root: Path) -> DataSet:
    """The set in a folder, opened once."""
    return DataSet(root)


@pytest.fixture(scope="session")
def data_set(pytestconfig: pytest.Config) -> DataSet:
    """The test data that `--data` names."""
    return open_data_set(pytestconfig.getoption("data"))


_CASES = {
    "inner_case": "inner_cases",
    "states_case": "states_cases",
    "linear_case": "linear_cases",
    "moe_case": "moe_cases",
    "checkpoint_path": "checkpoints",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test once for each case of the kind that it asks for."""
    for name, attribute in _CASES.items():
        if name in metafunc.fixturenames:
            cases = getattr(open_data_set(metafunc.config.getoption("data")), attribute)
            metafunc.parametrize(name, list(cases.values()), ids=list(cases))
