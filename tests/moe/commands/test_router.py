"""Holds the demo's router to the peer's routes, and to refusing models that it does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import exl3_files
from data_set import DataSet
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.layers import find_layer
from trellis_moe import MoeError, MoeUnsupportedError, MoeValueError
from trellis_moe.commands.router import route


def test_routes_are_those_of_the_peer(data_set: DataSet) -> None:
    cases = [case for case in data_set.moe_cases.values() if case.checkpoint.name == "tiny_3_mul1" and case.batch == 40]
    assert cases
    for case in cases:
        with open_checkpoint(case.checkpoint) as checkpoint:
            ids, weights = route(checkpoint, find_layer(checkpoint, case.layer), torch.from_numpy(case.x))
        order, stored = ids.sort(), torch.from_numpy(case.topk_ids).sort()
        assert torch.equal(order.values, stored.values)
        found = weights.gather(1, order.indices).float()
        wanted = torch.from_numpy(case.topk_weights).gather(1, stored.indices).float()
        assert (found - wanted).abs().max() <= 2e-3


CONFIG = {"model_type": "qwen3_moe", "num_experts_per_tok": 2, "hidden_act": "silu", "norm_topk_prob": False}


def small(tmp_path: Path, config: dict[str, Any], gate: np.ndarray | None) -> Path:
    tensors = exl3_files.random_layer(np.random.default_rng(0))
    if gate is not None:
        tensors["model.layers.0.mlp.gate.weight"] = gate
    return exl3_files.write_checkpoint(tmp_path / "model", tensors, config=config)


@pytest.mark.parametrize(("model_type", "normalised"), [("qwen3_moe", False), ("mixtral", True)])
def test_weights_are_probabilities(tmp_path: Path, model_type: str, normalised: bool) -> None:
    gate = np.random.default_rng(1).normal(size=(2, 128)).astype(np.float16)
    config = CONFIG | {"model_type": model_type, "num_experts_per_tok": 1}
    x = torch.randn(5, 128, generator=torch.Generator().manual_seed(0)).half()
    with open_checkpoint(small(tmp_path, config, gate)) as checkpoint:
        ids, weights = route(checkpoint, find_layer(checkpoint, 0), x)
    logits = x.double().numpy() @ gate.astype(np.float64).T
    odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert ids[:, 0].tolist() == odds.argmax(1).tolist()
    wanted = np.ones(5) if normalised else odds.max(1)
    np.testing.assert_allclose(weights[:, 0].double().numpy(), wanted, rtol=1e-3)


GATE = np.zeros((2, 128), np.float16)


@pytest.mark.parametrize(
    ("changes", "gate", "kind", "words"),
    [
        ({"model_type": "gpt_oss"}, GATE, MoeUnsupportedError, "this one is 'gpt_oss'"),
        ({"model_type": None}, GATE, MoeUnsupportedError, "this one is None"),
        ({}, None, MoeValueError, r"mlp.gate.weight: the router must be \(2, 128\), got None"),
        ({}, GATE[:1], MoeValueError, r"the router must be \(2, 128\), got \(1, 128\)"),
        ({"num_experts_per_tok": 3}, GATE, MoeValueError, "num_experts_per_tok must be 1 to 2, got 3"),
        ({"num_experts_per_tok": None}, GATE, MoeValueError, "num_experts_per_tok must be 1 to 2, got None"),
    ],
)
def test_what_cannot_be_routed_is_refused(
    tmp_path: Path, changes: dict[str, Any], gate: np.ndarray | None, kind: type[MoeError], words: str
) -> None:
    with open_checkpoint(small(tmp_path, CONFIG | changes, gate)) as checkpoint:
        layer = find_layer(checkpoint, 0)
        with pytest.raises(kind, match=words):
            route(checkpoint, layer, torch.zeros(3, 128))
