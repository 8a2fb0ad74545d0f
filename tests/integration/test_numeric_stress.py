"""Holds layers to the error budget of `docs/reliability.md` where numbers are extreme, token by token against float64.

The budget is 1e-3 (4e-3 for bfloat16), times what the law between the GEMMs makes of a relative error before it.  On
paths that do not scale operands it is what float64 with their roundings to float16 loses, where that is more, and a
token whose operands leave float16 may be not finite.  Finite and wrong is the failure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch

from moe.samples import BOUNDS, LAWS, Layer, Routes, launch, make_binding, make_layer, make_plan, truth, with_weights
from trellis_format.hadamard import hadamard
from trellis_format.reference import linear
from trellis_moe.variants import OP_BY_OP

LARGEST = 65504.0
STEP_LOSS = (
    3e-8  # of an operand, over its root mean square: half of float16's smallest step, with room for a sum's growth
)
TIES = 0.25  # of the budget: one rounding of 256 goes the other way, 2^-10 of an operand 4 times its row's size
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 256, 384, 4, 2

_Double = npt.NDArray[np.float64]
Inputs = Callable[[np.random.Generator, tuple[int, int]], _Double]


def largest(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    return rng.choice([-LARGEST, LARGEST], shape)


def one_sign(_rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    return np.full(shape, LARGEST)


def smallest(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    return rng.choice([-(2.0**-24), 2.0**-24, 0.0], shape)


def of_all_sizes(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    """Every magnitude of float16 in one row."""
    return rng.choice([-1.0, 1.0], shape) * 2.0 ** rng.uniform(-24, 15.9, shape)


def rows_of_all_sizes(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    """Rows of zeros, and rows of every magnitude beside each other."""
    rows = rng.standard_normal(shape) * 2.0 ** rng.uniform(-20, 12, (shape[0], 1))
    rows[::3] = 0
    return rows


def one_channel(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    """Order one, but for a channel that is huge in every token."""
    rows = rng.standard_normal(shape)
    rows[:, 37] = 3e4
    return rows


def ordinary(rng: np.random.Generator, shape: tuple[int, int]) -> _Double:
    return rng.standard_normal(shape)


INPUTS: dict[str, Inputs] = {
    function.__name__: function
    for function in (ordinary, largest, one_sign, smallest, of_all_sizes, rows_of_all_sizes, one_channel)
}


def spread(rng: np.random.Generator, values: npt.NDArray[np.float16]) -> npt.NDArray[np.float16]:
    """Scales by powers of two from 2^-14 to 2^14 of their own."""
    return (np.sign(values) * 2.0 ** rng.integers(-14, 15, values.shape)).astype(np.float16)


def scaled(layer: Layer, which: str) -> Layer:
    """The layer with scales from 2^-14 to 2^14 in one place, or as it is."""
    rng = np.random.default_rng(3)
    weights = layer.weights
    if which == "input":
        return with_weights(layer, input_scales=spread(rng, weights.input_scales))
    if which == "output":
        return with_weights(layer, output_scales=spread(rng, weights.output_scales))
    if which in ("gate", "up", "down"):
        index = ("gate", "up", "down").index(which)
        scales = weights.intermediate_scales.copy()
        scales[:, index] = spread(rng, scales[:, index])
        return with_weights(layer, intermediate_scales=scales)
    return layer


SCALES = ("plain", "input", "gate", "up", "down", "output")
CASES = [(inputs, "plain", law) for inputs in INPUTS for law in (0, 1, 5)] + [
    (inputs, where, 0) for inputs in ("ordinary", "one_channel", "rows_of_all_sizes") for where in SCALES[1:]
]


@dataclass(frozen=True)
class Operands:
    """What a token's result depends on.

    Attributes:
        smallest: for each token, the smallest root mean square of what meets weights in float16.
        largest: likewise, the largest magnitude.
        condition: the relative change of what the law gives, over that of its arguments; 1 where it is at most 4, which
            the sums of a GEMM average out.
    """

    smallest: _Double
    largest: _Double
    condition: _Double


def operands(layer: Layer, routes: Routes) -> Operands:
    """Of a layer with an input vector for each expert; routes' outputs count, which one path keeps in float16."""
    source, weights = layer.source, layer.weights
    x = np.zeros((routes.x.shape[0], source.geometry.padded_hidden_size))
    x[:, : routes.x.shape[1]] = routes.x.double().numpy()
    least, most, condition = np.full(len(x), np.inf), np.zeros(len(x)), np.ones(len(x))
    for expert in range(source.geometry.num_experts):
        tokens = np.unique(np.nonzero(routes.ids.numpy() == expert)[0])
        if not tokens.size:
            continue
        met, branches = [], []
        for index in range(len(source.geometry.projections)):
            last = index == len(source.geometry.projections) - 1
            given = source_law(layer, branches) if last else x[tokens]
            rows = len(weights.input_scales[expert])
            suh = weights.intermediate_scales[expert, -1] if last else weights.input_scales[expert, index % rows]
            svh = weights.output_scales[expert] if last else weights.intermediate_scales[expert, index]
            met.append(hadamard(given * suh.astype(np.float64)))
            trellis = weights.codes[expert][index].read()
            branches.append(linear(given, trellis, suh, svh, source.codebook, source.rates.rate(expert, index)))
        met += [branches[-1], hadamard(branches[-1] / weights.output_scales[expert].astype(np.float64))]
        condition[tokens] = np.maximum(condition[tokens], sensitivity(layer, branches[:-1], expert))
        for rows_ in met:
            least[tokens] = np.minimum(least[tokens], np.sqrt(np.mean(rows_**2, axis=1)))
            most[tokens] = np.maximum(most[tokens], np.abs(rows_).max(axis=1))
    return Operands(least, most, np.where(condition > 4, condition, 1.0))


def sensitivity(layer: Layer, branches: list[_Double], expert: int) -> _Double:
    """Relative change of each row that the law gives, over that of the sums of gate and up before their scales.

    Every channel moves by as much as float16 operands may move one, the way that changes the result most: near a limit
    few channels make all of the change.
    """
    change = 1e-3
    plain = source_law(layer, branches)
    size, most = np.linalg.norm(plain, axis=1), np.zeros_like(plain)
    for ways in itertools.product((-1.0, 1.0), repeat=len(branches)):
        moved = []
        for index, (branch, way) in enumerate(zip(branches, ways, strict=True)):
            svh = layer.weights.intermediate_scales[expert, index].astype(np.float64)
            moved.append(branch + way * change * svh * np.sqrt(np.mean((branch / svh) ** 2, axis=1, keepdims=True)))
        most = np.maximum(most, np.abs(source_law(layer, moved) - plain))
    return np.where(size > 0, np.linalg.norm(most, axis=1) / np.where(size > 0, size, 1) / change, 1.0)


def source_law(layer: Layer, branches: list[_Double]) -> _Double:
    law = layer.source.activation
    assert law is not None
    return law.apply(branches[0] if len(branches) == 2 else None, branches[-1])


def half(values: _Double) -> _Double:
    """To the nearest float16, subnormals too; what leaves float16 stays."""
    with np.errstate(over="ignore"):
        near = values.astype(np.float16).astype(np.float64)
    return np.where(np.isinf(near), values, near)


def rounded(layer: Layer, routes: Routes, rounding: Callable[[_Double], _Double] = half) -> torch.Tensor:
    """`truth`, but what meets weights and what leaves a route are rounded, as on the paths that do not scale."""
    source, weights = layer.source, layer.weights
    given = routes.x.double().numpy()
    total = np.zeros_like(given)

    def product(rows: _Double, expert: int, index: int, suh: npt.NDArray[np.float16], last: bool) -> _Double:
        scale = suh.astype(np.float64)
        svh = weights.output_scales[expert] if last else weights.intermediate_scales[expert, index]
        met = hadamard(rounding(hadamard(rows * scale))) / scale
        trellis = weights.codes[expert][index].read()
        return linear(met, trellis, suh, svh, source.codebook, source.rates.rate(expert, index))

    down = len(source.geometry.projections) - 1
    for expert in range(source.geometry.num_experts):
        tokens, slots = np.nonzero(routes.ids.numpy() == expert)
        if not tokens.size:
            continue
        vectors = weights.input_scales[expert]
        branches = [product(given[tokens], expert, i, vectors[i % len(vectors)], False) for i in range(down)]
        made = product(source_law(layer, branches), expert, down, weights.intermediate_scales[expert, -1], True)
        np.add.at(total, tokens, rounding(made) * routes.weights.double().numpy()[tokens, slots, None])
    return torch.from_numpy(total)


def budget(layer: Layer, routes: Routes, wanted: torch.Tensor, met: Operands, unscaled: bool) -> torch.Tensor:
    """The largest error of each token."""
    least = BOUNDS[routes.x.dtype]
    whole = least * torch.from_numpy(met.condition)
    if not unscaled:
        return whole
    whole += STEP_LOSS / torch.from_numpy(met.smallest)
    return (errors(rounded(layer, routes), wanted) + TIES * whole).clamp(min=least)


def errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Relative L2 of each token; 0 where both are zero, infinity where only one is finite or zero."""
    difference, size = (found.double() - wanted).norm(dim=1), wanted.norm(dim=1)
    return torch.where(size > 0, difference / size, torch.where(difference > 0, torch.inf, 0.0))


def check(layer: Layer, routes: Routes, device: str) -> tuple[int, int]:
    """Tokens that are right and that are not finite; the others fail."""
    tokens, top_k = routes.ids.shape
    plan = make_plan(layer, tokens=tokens, top_k=top_k, dtype=routes.x.dtype, device=device)
    found, wanted = launch(make_binding(layer, plan), routes), truth(layer, routes)
    wrong, finite = errors(found, wanted), found.isfinite().all(dim=1)
    met = operands(layer, routes)
    unscaled = plan.variants[-1].path != OP_BY_OP
    bound = budget(layer, routes, wanted, met, unscaled)
    if unscaled:
        beyond = torch.from_numpy(met.largest > LARGEST * 0.99)
        assert bool((finite | beyond).all()), "a token is not finite though float16 holds its operands"
    else:
        assert bool(finite.all())
    bad = finite & (wrong > bound)
    assert not bad.any(), (
        f"tokens {bad.nonzero().flatten().tolist()}: {wrong[bad].tolist()} above {bound[bad].tolist()}"
    )
    return int(finite.sum()), int((~finite).sum())


def sample(inputs: str, where: str, law: int, dtype: torch.dtype, tokens: int) -> tuple[Layer, Routes]:
    layer = scaled(
        make_layer(
            experts=EXPERTS, hidden=HIDDEN, intermediate=INTERMEDIATE, rates=("3", "2"), activation=LAWS[law], seed=law
        ),
        where,
    )
    rng = np.random.default_rng([tokens, law])
    x = torch.from_numpy(INPUTS[inputs](rng, (tokens, HIDDEN))).to(dtype)
    ids = torch.from_numpy(rng.integers(0, EXPERTS, (tokens, TOP_K)))
    return layer, Routes(x, ids, torch.from_numpy(rng.uniform(0.1, 1.0, (tokens, TOP_K))).float())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("inputs", "where", "law"), CASES)
def test_every_token_is_inside_the_budget(inputs: str, where: str, law: int, dtype: torch.dtype) -> None:
    assert check(*sample(inputs, where, law, dtype, 9), "cpu") == (9, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        (torch.float16, 2), (torch.float16, 40), (torch.float16, 600), (torch.bfloat16, 2), (torch.bfloat16, 600),
        (torch.float32, 40),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(("inputs", "where", "law"), CASES)
def test_gpu_every_token_is_inside_the_budget_or_not_finite(
    inputs: str, where: str, law: int, dtype: torch.dtype, tokens: int
) -> None:
    right, _ = check(*sample(inputs, where, law, dtype, tokens), "cuda")
    assert right == tokens or inputs != "ordinary" or where != "plain"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("tokens", [2, 40, 600])
def test_zeros_give_zeros_beside_tokens_that_are_not(device: str, tokens: int) -> None:
    layer, routes = sample("largest", "plain", 0, torch.float16, tokens)
    routes.x[1::2] = 0
    plan = make_plan(layer, tokens=tokens, top_k=TOP_K, device=device)
    found = launch(make_binding(layer, plan), routes)
    assert not found[1::2].any()
    assert bool(found[::2].any(dim=1).all())


def test_the_budget_sees_what_is_wrong() -> None:
    wanted = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)
    found = torch.tensor([[1.0, 0.01], [0.0, 0.0], [1e-30, 0.0], [torch.nan, 0.0]])
    assert errors(found, wanted).tolist()[:3] == [pytest.approx(0.01), 0.0, torch.inf]
    assert errors(found, wanted)[3].isnan()
    met = operands(*sample("largest", "plain", 0, torch.float16, 3))
    assert met.largest.min() > LARGEST  # so that this input leaves float16 on the paths that do not scale
    plain = operands(*sample("ordinary", "plain", 0, torch.float16, 3))
    assert plain.largest.max() < LARGEST
    assert plain.smallest.min() > 1e-2
    assert plain.condition.max() == 1
    limited = operands(*sample("one_channel", "plain", 1, torch.float16, 3))
    assert limited.condition.max() > 4  # a limit hides the size of its argument and keeps the argument's error


@pytest.mark.parametrize(
    ("inputs", "where", "law", "tokens", "token", "measured"),
    [
        ("of_all_sizes", "plain", 1, 40, 15, 0.11012),  # a limit next to inputs of all sizes
        ("of_all_sizes", "plain", 1, 600, 20, 0.11878),
        ("rows_of_all_sizes", "plain", 1, 600, 590, 0.0010818),
        ("rows_of_all_sizes", "gate", 0, 600, 293, 0.0010083),
        ("rows_of_all_sizes", "output", 0, 600, 343, 0.10600),  # outputs of a few steps of float16
    ],
)
def test_roundings_explain_what_a_gpu_loses(
    inputs: str, where: str, law: int, tokens: int, token: int, measured: float
) -> None:
    layer, routes = sample(inputs, where, law, torch.float16, tokens)
    part = routes.part([token])
    wanted, met = truth(layer, part), operands(layer, part)
    assert errors(rounded(layer, part), wanted).item() == pytest.approx(measured, rel=5e-3)
    bound = budget(layer, part, wanted, met, True).item()
    assert measured < bound < 1.3 * measured


def test_the_budget_sees_subnormals_that_are_flushed_and_roundings_that_cut() -> None:
    def flushed(values: _Double) -> _Double:
        return np.where(np.abs(values) < 2.0**-14, 0.0, half(values))

    def cut(values: _Double) -> _Double:
        near = half(values)
        toward = np.nextafter(near.clip(-LARGEST, LARGEST).astype(np.float16), np.float16(0)).astype(np.float64)
        return np.where(np.abs(near) > np.abs(values), toward, near)

    for inputs, where, tokens, rounding in (
        ("rows_of_all_sizes", "output", 600, flushed),
        ("rows_of_all_sizes", "input", 600, flushed),
        ("rows_of_all_sizes", "output", 600, cut),
    ):
        layer, routes = sample(inputs, where, 0, torch.float16, tokens)
        part = routes.part(slice(0, 40))
        wanted, met = truth(layer, part), operands(layer, part)
        bound = budget(layer, part, wanted, met, True)
        assert not bool((errors(rounded(layer, part), wanted) > bound).any())
        assert bool((errors(rounded(layer, part, rounding), wanted) > bound).any()), (inputs, where)
