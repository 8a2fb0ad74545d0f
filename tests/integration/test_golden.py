"""Holds whole layers of real checkpoints to the peer's outputs and to float64, through the API and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data_set import DEFAULT_DATA, MoeCase, open_data_set
from integration.commands import run_here, run_process
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.reference import moe_forward
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    RoutingSpec,
    bind,
    plan_execution,
    plan_weights,
    prepare_weights,
)
from trellis_prep import even_extents

PEER_BOUND = 2e-3
FLOAT64_BOUND = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-3}
SHARES_BOUND_CPU = 1e-6
"""Relative L2 of the sum of the shares to the whole; the torch backend adds products exactly."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def distance(found: torch.Tensor, wanted: np.ndarray | torch.Tensor) -> float:
    difference = found.double() - torch.as_tensor(wanted).double()
    return float(difference.norm() / torch.as_tensor(wanted).double().norm())


def float64(case: MoeCase, x: np.ndarray) -> np.ndarray:
    with open_checkpoint(case.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, case.layer))
        return moe_forward(source, weights, x, case.topk_ids, case.topk_weights)


def write_case(folder: Path, case: MoeCase) -> Path:
    path = folder / "in.safetensors"
    save_file({name: torch.from_numpy(getattr(case, name)) for name in ("x", "topk_ids", "topk_weights")}, path)
    return path


def shares_bound(case: MoeCase, width: int, paths: set[str]) -> float:
    """Relative L2 of the sum of the shares to the whole on a GPU, from the arithmetic.

    Kernels add float32 sums of `hidden` products in an order that follows the share's width.  Each of the additions
    rounds by up to 2^-24 of the sum so far, a random walk; two orders so differ by sqrt(hidden / 3) * 2^-24 of a sum's
    size, and by up to four times that after gate, up, the activation's slope and the rotations.  Such a difference
    changes down's float16 operand only where a border between two of its values, 2^-11 apart or more, lies in it, and
    then by one step, at most 2^-10.  So many operands move: Poisson, five deviations up, five more for small counts.
    Operands of a row have about one size after their rotation; those that move are taken to be twice as large.

    Many-token kernels hold the rows of a share in float16 before they are added: 2^-11 of them.
    """
    step = 2.0**-10
    operands = case.topk_ids.size * width
    chance = 4 * math.sqrt(case.x.shape[1] / 3) * 2.0**-24 / 2.0**-11
    moved = chance * operands + 5 * math.sqrt(chance * operands) + 5
    rows = 2.0**-11 if "prefill" in paths else 0.0
    return 2 * step * math.sqrt(min(moved / operands, 1.0)) + rows


def through_the_api(
    case: MoeCase, x: torch.Tensor, device: str, world_size: int = 1, *, paths: set[str] | None = None
) -> list[torch.Tensor]:
    """Open, describe, plan, prepare, bind and run each rank's share; `paths` gets those that were taken."""
    outputs = []
    with open_checkpoint(case.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, case.layer))
        assert source.activation is not None
        for extent in even_extents(source.geometry.padded_intermediate_size, world_size):
            shares = plan_weights(source, extent)
            plan = plan_execution(
                shares,
                activation=ActivationSpec(nonlinearity=source.activation, io_dtype=str(x.dtype).removeprefix("torch.")),
                capacity=ExecutionCapacity(max_tokens=x.shape[0], top_k=case.topk_ids.shape[1]),
                routing=RoutingSpec(id_dtype=case.topk_ids.dtype.name, weight_dtype=case.topk_weights.dtype.name),
                device=device,
            )
            if paths is not None:
                paths.add(plan.variant_for(x.shape[0]).path)
            scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8, device=device)
            binding = bind(plan, prepare_weights(shares, weights, device=device), scratch)
            arguments = (x, torch.from_numpy(case.topk_ids), torch.from_numpy(case.topk_weights))
            out = torch.full(x.shape, float("nan"), device=device)
            outputs.append(binding.run(*(tensor.to(device) for tensor in arguments), out=out).cpu())
    return outputs


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_near_the_peer_and_nearer_to_float64(moe_case: MoeCase, device: str) -> None:
    (y,) = through_the_api(moe_case, torch.from_numpy(moe_case.x), device)
    assert distance(y, float64(moe_case, moe_case.x)) <= FLOAT64_BOUND[torch.float16]
    if moe_case.y_float64 is not None:
        assert distance(y, moe_case.y_float64) <= FLOAT64_BOUND[torch.float16]
    if moe_case.y is not None:
        assert distance(y, moe_case.y) <= PEER_BOUND


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOAT64_BOUND, ids=str)
def test_other_dtypes_of_x_are_near_float64(moe_case: MoeCase, dtype: torch.dtype, device: str) -> None:
    x = torch.from_numpy(moe_case.x).to(dtype)
    (y,) = through_the_api(moe_case, x, device)
    assert distance(y, float64(moe_case, x.double().numpy())) <= FLOAT64_BOUND[dtype]


@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_every_world_size_add_up(moe_case: MoeCase, device: str) -> None:
    x = torch.from_numpy(moe_case.x)
    (whole,) = through_the_api(moe_case, x, device)
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        blocks = find_layer(checkpoint, moe_case.layer).experts[0]["down"].k // 128
    for world_size in range(2, blocks + 1):
        paths: set[str] = set()
        parts = through_the_api(moe_case, x, device, world_size, paths=paths)
        assert len(parts) == world_size
        bound = SHARES_BOUND_CPU if device == "cpu" else shares_bound(moe_case, 128 * blocks, paths)
        assert distance(torch.stack(parts).double().sum(0), whole) <= bound


def test_the_command_gives_the_bits_of_the_api(moe_case: MoeCase, tmp_path: Path) -> None:
    source, output = write_case(tmp_path, moe_case), tmp_path / "y.safetensors"
    files = ("--checkpoint", moe_case.checkpoint, "--layer", moe_case.layer, "--input", source, "--output", output)
    done = run_here("run", *files, "--device", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    y = load_file(output)["y"]
    (expected,) = through_the_api(moe_case, torch.from_numpy(moe_case.x), "cpu")
    assert torch.equal(y, expected)
    report = json.loads(done.out)
    assert (report["tokens"], report["top_k"]) == moe_case.topk_ids.shape
    total = torch.zeros_like(y, dtype=torch.float64)
    blocks = report["geometry"]["padded_intermediate_size"] // 128
    for rank in range(blocks):
        done = run_here("run", *files, "--device", "cpu", "--json", "--tp-rank", rank, "--tp-size", blocks)
        assert json.loads(done.out)["channels"] == [128 * rank, 128 * (rank + 1)]
        total += load_file(output)["y"]
    assert distance(total, y) <= 1e-6


@pytest.fixture(scope="module")
def case(pytestconfig: pytest.Config) -> MoeCase:
    cases = open_data_set(pytestconfig.getoption("data")).moe_cases
    return next(case for case in cases.values() if case.checkpoint.name == "tiny_3_mul1" and case.x.shape[0] >= 8)


def test_the_command_runs_as_a_process(case: MoeCase, tmp_path: Path) -> None:
    source, output = write_case(tmp_path, case), tmp_path / "y.safetensors"
    files = ("--checkpoint", case.checkpoint, "--layer", case.layer, "--input", source, "--output", output)
    done = run_process("run", *files, "--device", "cpu", "--json")
    assert (done.code, done.err) == (0, "")
    y = load_file(output)["y"]
    assert case.y is not None
    assert distance(y, case.y) <= PEER_BOUND
    assert distance(y, float64(case, case.x)) <= 1e-3
    assert json.loads(done.out)["schema"] == "trellis-moe/run"


@pytest.mark.parametrize("device", DEVICES)
def test_the_demo_runs_as_a_process(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(DEFAULT_DATA)
    done = run_process("demo", "--device", device, "--json")
    assert (done.code, done.err) == (0, "")
    report: dict[str, Any] = json.loads(done.out)
    assert (report["ok"], report["routes_agree"], report["tokens"]) == (True, True, 8)
    assert 0 < report["error_float64"] <= 1e-3
    assert 0 < report["error_exllamav3"] <= 2e-3


@pytest.mark.gpu
def test_the_command_takes_a_gpu(case: MoeCase, tmp_path: Path) -> None:
    source, output = write_case(tmp_path, case), tmp_path / "y.safetensors"
    files = ("--checkpoint", case.checkpoint, "--layer", case.layer, "--input", source, "--output", output)
    done = run_process("run", *files, "--device", "cuda", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["device"].startswith("cuda")
    assert distance(load_file(output)["y"], float64(case, case.x)) <= 1e-3
