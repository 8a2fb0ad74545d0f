"""Holds layers of every container to one result: what is converted runs to the same bits, and near float64."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from data_set import MoeCase
from slot_files import random_content, random_linears
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.container import reader as container_reader
from trellis_format.container import writer as container_writer
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.native import reader as native_reader
from trellis_format.native import writer as native_writer
from trellis_format.native.layer import trellis_from_native
from trellis_format.reference import moe_forward
from trellis_format.source import TrellisSource, TrellisWeights
from trellis_moe import (
    ActivationSpec,
    ExecutionCapacity,
    bind,
    plan_execution,
    plan_weights,
    prepare_weights,
)
from trellis_prep import even_extents

FLOAT64_BOUND = 1e-3


def run(
    source: TrellisSource, weights: TrellisWeights, x: np.ndarray, ids: np.ndarray, factors: np.ndarray, ranks: int
) -> list[torch.Tensor]:
    """Every rank's partial output, on the CPU."""
    assert source.activation is not None
    outputs = []
    for extent in even_extents(source.geometry.padded_intermediate_size, ranks):
        shares = plan_weights(source, extent)
        plan = plan_execution(
            shares,
            activation=ActivationSpec(nonlinearity=source.activation, io_dtype="float16"),
            capacity=ExecutionCapacity(max_tokens=x.shape[0], top_k=ids.shape[1]),
        )
        scratch = torch.full((plan.required_nbytes(),), 0xFF, dtype=torch.uint8)
        binding = bind(plan, prepare_weights(shares, weights), scratch)
        out = torch.full(x.shape, float("nan"))
        arguments = (torch.from_numpy(array) for array in (x.astype(np.float16), ids, factors.astype(np.float32)))
        outputs.append(binding.run(*arguments, out=out))
    return outputs


def distance(found: torch.Tensor, wanted: np.ndarray) -> float:
    return float((found.double() - torch.from_numpy(wanted)).norm() / np.linalg.norm(wanted))


@pytest.mark.parametrize("hold_codes", [True, False])
def test_native_layers_run_to_the_bits_of_raw_ones(moe_case: MoeCase, tmp_path: Path, hold_codes: bool) -> None:
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        layer = trellis_from_exl3(find_layer(checkpoint, moe_case.layer))
        head = native_writer.plan_head({7: layer[0]})
        entry = native_writer.write_layer(tmp_path, head, 7, *layer)
        manifest = native_writer.write_manifest(tmp_path, head, {7: entry})
        found = trellis_from_native(native_reader.read_layer(tmp_path, manifest, 7, hold_codes=hold_codes))
        blocks = layer[0].geometry.padded_intermediate_size // 128
        for ranks in range(1, min(blocks, 2) + 1):
            arguments = (moe_case.x, moe_case.topk_ids, moe_case.topk_weights, ranks)
            for mine, theirs in zip(run(*layer, *arguments), run(*found, *arguments), strict=True):
                assert torch.equal(mine, theirs)


def test_container_layers_run_to_the_bits_of_raw_ones(moe_case: MoeCase, tmp_path: Path) -> None:
    with open_checkpoint(moe_case.checkpoint) as checkpoint:
        layer = trellis_from_exl3(find_layer(checkpoint, moe_case.layer))
        reason = container_writer.container_refusal(layer[0])
        if reason is not None:
            assert any(word in reason for word in ("codebook", "bias", "padding", "K = "))
            return
        head = container_writer.plan_head({7: layer[0]})
        entry = container_writer.write_layer(tmp_path, head, 7, *layer)
        manifest = container_writer.write_manifest(tmp_path, head, {7: entry})
        content = container_reader.read_layer(tmp_path, manifest, 7)
        found = trellis_from_exl3(content, activation=layer[0].activation)
        arguments = (moe_case.x, moe_case.topk_ids, moe_case.topk_weights, 1)
        (mine,), (theirs,) = run(*layer, *arguments), run(*found, *arguments)
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("codebook", "bits"), [("mcg", 4), ("lut_e4m3", 2), ("lut_e4m3", 3), ("lut_fp16", 5)])
def test_container_layers_of_every_codebook_are_near_float64(codebook: str, bits: int) -> None:
    content = random_content(experts=4, hidden=256, intermediate=384, codebook=codebook, bits=bits)
    scaled = dataclasses.replace(content, down_svh=content.down_svh / np.float16(64))
    source, weights = trellis_from_exl3(scaled, activation=Activation("silu"))
    rng = np.random.default_rng(bits)
    x = rng.normal(size=(9, 256)).astype(np.float16) / np.float16(16)
    ids = np.stack([rng.permutation(4)[:2] for _ in range(9)])
    factors = rng.uniform(0.1, 1, (9, 2)).astype(np.float32)
    (y,) = run(source, weights, x, ids, factors, 1)
    assert distance(y, moe_forward(source, weights, x, ids, factors)) <= FLOAT64_BOUND


def test_an_intermediate_hadamard_runs_near_float64() -> None:
    source, weights = random_linears(hidden=512, codebook="mcg", rates=(3,), transform=True)
    rng = np.random.default_rng(5)
    x = (rng.normal(size=(9, 512)) / 16).astype(np.float16)
    ids = np.stack([rng.permutation(3)[:2] for _ in range(9)])
    factors = rng.uniform(0.1, 1, (9, 2)).astype(np.float32)
    (y,) = run(source, weights, x, ids, factors, 1)
    assert distance(y, moe_forward(source, weights, x, ids, factors)) <= FLOAT64_BOUND
