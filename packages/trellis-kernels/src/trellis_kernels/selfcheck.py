"""Owns the self-check: every op in every backend of a device, against numpy in float64.  It must not know checkpoints.

Inputs are fixed patterns, so that two machines that disagree can compare rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from platform import python_version

import numpy as np
import numpy.typing as npt
import torch

from trellis_format.activations import ACTIVATIONS, Activation
from trellis_format.codebooks import CODEBOOKS
from trellis_format.hadamard import hadamard
from trellis_format.rates import Rate
from trellis_format.tiles import decode_inner
from trellis_format.version import version as own_version
from trellis_kernels.bank import CodeBank
from trellis_kernels.errors import KernelUnsupportedError
from trellis_kernels.ops import BACKENDS, OPS, implementation
from trellis_kernels.routes import PackedRoutes

__all__ = ["Check", "compiler_state", "environment_lines", "pattern_codes", "run_checks"]

_WORD_STEP = 0x9E3779B1  # the golden ratio's fraction in 32 bits, odd, so that words do not repeat
_TOKENS, _TOP_K, _EXPERTS, _CHANNELS = 5, 3, 4, 256
_MANY_TOKENS = 700  # whose routes are more than one launch packs
_BOUND = 1e-5  # relative to the largest value: float32 sums of a few hundred terms
_HALF_BOUND = 2e-3  # the same where terms and result are rounded to float16

_Double = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        op: what ran.
        case: on what.
        backend: which backend ran it.
        outcome: `ok`, `skipped: why`, or what is wrong.
    """

    op: str
    case: str
    backend: str
    outcome: str

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong."""
        return self.outcome == "ok" or self.outcome.startswith("skipped")


def compiler_state() -> tuple[str | None, str | None]:
    """Whether kernels can be compiled here.

    Returns:
        The version of nvidia-cutlass-dsl, None where it is not installed; and the name of the exception that importing
        it raises, None where it can be imported or is not installed.
    """
    try:
        found = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        return None, None
    try:
        importlib.import_module("cutlass")
    except Exception as error:  # noqa: BLE001  # a broken installation may raise anything, and is what is looked for
        return found, type(error).__name__
    return found, None


def environment_lines(device: torch.device) -> list[str]:
    """What a report of trouble needs: versions, and the device."""
    try:
        dsl = version("nvidia-cutlass-dsl")
    except PackageNotFoundError:
        dsl = "not installed"
    own = f"trellis-kernels {own_version()}"
    lines = [f"{own}, Python {python_version()}, torch {torch.__version__}, nvidia-cutlass-dsl {dsl}"]
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        lines.append(f"{device}: {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    else:
        lines.append(f"{device}")
    return lines


def pattern_codes(tiles: int, rate: Rate) -> npt.NDArray[np.int16]:
    """Tiles whose little-endian word i is 0x9E3779B1 * (i + 1) modulo 2^32.

    Args:
        tiles: how many.
        rate: K.

    Returns:
        `[1, tiles, 16*K] int16`.
    """
    count = np.arange(1, tiles * rate.tile_words32 + 1, dtype=np.uint64)
    words = (count * np.uint64(_WORD_STEP)).astype(np.uint32)
    return words.view(np.int16).reshape(1, tiles, rate.tile_words16)


def run_checks(device: torch.device) -> Iterator[Check]:
    """Run every op in every backend that the device has, one comparison after the other.

    Args:
        device: where; on a CPU there is the torch backend alone.
    """
    backends = BACKENDS if device.type == "cuda" else ("cpu",)
    for backend in backends:
        for op, case, check in _cases(device, backend):
            yield Check(op, case, backend, _outcome(check))


def _outcome(check: Callable[[], str | None]) -> str:
    try:
        return check() or "ok"
    except KernelUnsupportedError as error:
        return f"skipped: {error}"
    except Exception as error:  # noqa: BLE001  # one op's trouble must not hide the state of the others
        return f"failed: {type(error).__name__}: {error}"


def _cases(device: torch.device, backend: str) -> Iterator[tuple[str, str, Callable[[], str | None]]]:
    for name, codebook in CODEBOOKS.items():
        for rate in codebook.legal_rates:
            yield "decode", f"{name} K={rate}", partial(_decode, device, backend, name, rate)
    checks = {
        "rotate_input": _rotate_input,
        "rotate_output": _rotate_output,
        "pack_routes": _pack_routes,
        "grouped_gemm": _grouped_gemm,
        "reduce_routes": _reduce_routes,
    }
    for op in OPS:
        if op == "activate":
            for kind in ACTIVATIONS:
                yield op, kind, partial(_activate, device, backend, kind)
        elif op in checks:
            yield op, f"{_TOKENS} x {_TOP_K}", partial(checks[op], device, backend)
    yield "pack_routes", f"{_MANY_TOKENS} x {_TOP_K}", partial(_pack_routes, device, backend, _MANY_TOKENS)
    yield "reduce_routes", "atomic", partial(_reduce_atomically, device, backend)


def _decode(device: torch.device, backend: str, codebook: str, rate: Rate) -> str | None:
    codes = pattern_codes(7, rate)
    wanted = decode_inner(codes, CODEBOOKS[codebook], rate)
    out = torch.full(wanted.shape, torch.nan, dtype=torch.float16, device=device)
    implementation("decode", backend)(torch.from_numpy(codes).to(device), codebook=codebook, rate=rate, out=out)
    wrong = int((out.cpu().numpy().view(np.uint16) != wanted.view(np.uint16)).sum())
    return f"{wrong} of {wanted.size} weights differ" if wrong else None


def _wave(*shape: int, seed: int) -> _Double:
    """Numbers of order one that need no generator: sines at steps of one radian, exact in float16."""
    count = np.arange(int(np.prod(shape)), dtype=np.float64)
    return np.sin(count + seed).astype(np.float16).astype(np.float64).reshape(shape)


def _tensor(values: npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device, dtype)


def _distance(found: torch.Tensor, wanted: _Double, bound: float = _BOUND) -> str | None:
    error = float(np.abs(found.cpu().double().numpy() - wanted).max() / np.abs(wanted).max())
    return None if error <= bound else f"off by {error:.1e} of the largest value, bound {bound:.0e}"


def _empty(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=device)


def _rotate_input(device: torch.device, backend: str) -> str | None:
    x, scales = _wave(_TOKENS, _CHANNELS, seed=1), _wave(_EXPERTS, _CHANNELS, seed=2)
    rows, tables = np.arange(_TOKENS)[::-1].copy(), np.arange(_TOKENS) % _EXPERTS
    out = _empty(device, _TOKENS, _CHANNELS)
    implementation("rotate_input", backend)(
        _tensor(x, torch.float32, device),
        _tensor(scales, torch.float16, device),
        rows=_tensor(rows, torch.int64, device),
        tables=_tensor(tables, torch.int32, device),
        out=out,
    )
    return _distance(out, hadamard(x[rows] * scales[tables]))


def _rotate_output(device: torch.device, backend: str) -> str | None:
    y, scales = _wave(_TOKENS, _CHANNELS, seed=3), _wave(_EXPERTS, _CHANNELS, seed=4)
    bias, tables = _wave(_EXPERTS, _CHANNELS, seed=5), np.arange(_TOKENS) % _EXPERTS
    out = _empty(device, _TOKENS, _CHANNELS)
    implementation("rotate_output", backend)(
        _tensor(y, torch.float32, device),
        _tensor(scales, torch.float16, device),
        tables=_tensor(tables, torch.int32, device),
        bias=_tensor(bias, torch.float16, device),
        out=out,
    )
    return _distance(out, hadamard(y) * scales[tables] + bias[tables])


def _activate(device: torch.device, backend: str, kind: str) -> str | None:
    law = Activation(kind, limit=0.75) if kind == "swigluoai" else Activation(kind)
    gate, up = 4.0 * _wave(_TOKENS, _CHANNELS, seed=6), 4.0 * _wave(_TOKENS, _CHANNELS, seed=7)
    out = _empty(device, _TOKENS, _CHANNELS)
    given = _tensor(gate, torch.float32, device) if law.gated else None
    implementation("activate", backend)(given, _tensor(up, torch.float32, device), activation=law, out=out)
    return _distance(out, law.apply(gate if law.gated else None, up))


def _ids(tokens: int = _TOKENS) -> npt.NDArray[np.int64]:
    """Experts of each route; one is dropped."""
    ids = (np.arange(tokens * _TOP_K) * 7 % _EXPERTS).reshape(tokens, _TOP_K)
    ids[1, 2] = -1
    return ids


def _packed(device: torch.device, backend: str, tokens: int = _TOKENS) -> PackedRoutes:
    packed: PackedRoutes = implementation("pack_routes", backend)(
        _tensor(_ids(tokens), torch.int64, device), num_experts=_EXPERTS, block_rows=8
    )
    return packed


def _pack_routes(device: torch.device, backend: str, tokens: int = _TOKENS) -> str | None:
    packed = _packed(device, backend, tokens)
    flat = _ids(tokens).reshape(-1)
    slots = packed.route_indices.tolist()
    offsets = packed.expert_offsets.tolist()
    for expert in range(_EXPERTS):
        mine = [route for route in slots[offsets[expert] : offsets[expert + 1]] if route < flat.size]
        wanted = np.flatnonzero(flat == expert).tolist()
        if mine != wanted:
            return f"expert {expert} has routes {mine[:8]}, not {wanted[:8]}"
    return None


def _grouped_gemm(device: torch.device, backend: str) -> str | None:
    rate = Rate.of(3)
    side = _CHANNELS // 16
    codes = pattern_codes(_EXPERTS * side * side, rate).reshape(_EXPERTS, side, side, rate.tile_words16)
    tile_words = side * side * rate.tile_words32
    places = tuple((expert * tile_words, rate.half_bits) for expert in range(_EXPERTS))
    words = torch.from_numpy(codes.reshape(-1).view(np.int32)).to(device)
    bank = CodeBank("mcg", _CHANNELS, _CHANNELS, words, torch.tensor(places, device=device), places)
    a, flat = _wave(_TOKENS * _TOP_K, _CHANNELS, seed=8), _ids().reshape(-1)
    wanted = np.zeros_like(a)
    for route, expert in enumerate(flat):
        if expert >= 0:
            wanted[route] = a[route] @ decode_inner(codes[expert], CODEBOOKS["mcg"], rate).astype(np.float64)
    out = _empty(device, *a.shape)
    routes = _packed(device, "cpu")
    implementation("grouped_gemm", backend)(_tensor(a, torch.float16, device), bank, routes, out=out)
    return _distance(out, wanted)


def _reduce_routes(device: torch.device, backend: str) -> str | None:
    rows, weights = _wave(_TOKENS * _TOP_K, _CHANNELS, seed=9), np.abs(_wave(_TOKENS, _TOP_K, seed=10))
    out = _empty(device, _TOKENS, _CHANNELS)
    implementation("reduce_routes", backend)(
        _tensor(rows, torch.float32, device), _tensor(weights, torch.float16, device), factor=2.0, out=out
    )
    terms = rows.reshape(_TOKENS, _TOP_K, _CHANNELS) * weights[:, :, None] * 2.0
    return _distance(out, terms.sum(axis=1))


def _reduce_atomically(device: torch.device, backend: str) -> str | None:
    rows, weights = _wave(_TOKENS * _TOP_K, _CHANNELS, seed=11), np.abs(_wave(_TOKENS, _TOP_K, seed=12))
    out = _empty(device, _TOKENS, _CHANNELS).half()
    implementation("reduce_routes", backend)(
        _tensor(rows, torch.float32, device),
        _tensor(weights, torch.float16, device),
        accumulator=_empty(device, _TOKENS, _CHANNELS),
        out=out,
    )
    terms = rows.reshape(_TOKENS, _TOP_K, _CHANNELS) * weights[:, :, None]
    return _distance(out, terms.sum(axis=1), bound=_HALF_BOUND)
