"""Holds `run` to its order (refuse, then work, then write) and to a report of what it did."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import exl3_files
from moe.samples import distance, write_input
from trellis_format.activations import Activation
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.reference import moe_forward
from trellis_moe import MoeValueError
from trellis_moe.commands import run as module
from trellis_moe.commands.run import RunRequest, run


@pytest.fixture
def request_(tmp_path: Path) -> RunRequest:
    tensors = exl3_files.random_layer(
        np.random.default_rng(0), experts=3, intermediate=384, codebook="mul1",
        bits=lambda expert, word: (1, 2.5, 4)[expert],
    )  # fmt: skip
    config = {"hidden_act": "silu", "hidden_size": 128, "moe_intermediate_size": 300}
    checkpoint = exl3_files.write_checkpoint(tmp_path / "model", tensors, config=config)
    generator = torch.Generator().manual_seed(0)
    source = write_input(
        tmp_path / "in.safetensors",
        x=torch.randn(7, 128, generator=generator).to(torch.bfloat16) / 16,
        topk_ids=torch.randint(0, 3, (7, 2), generator=generator, dtype=torch.int32),
        topk_weights=torch.rand(7, 2, generator=generator),
    )
    return RunRequest(checkpoint=checkpoint, layer=0, input=source, output=tmp_path / "y.safetensors", device="cpu")


def reference(request: RunRequest, law: Activation | None = None) -> torch.Tensor:
    given = load_file(request.input)
    with open_checkpoint(request.checkpoint) as checkpoint:
        source, weights = trellis_from_exl3(find_layer(checkpoint, request.layer), activation=law)
        arrays = (given["x"].double().numpy(), given["topk_ids"].numpy(), given["topk_weights"].double().numpy())
        return torch.from_numpy(moe_forward(source, weights, *arrays))


def test_the_output_is_near_the_reference_and_the_report_says_what_ran(request_: RunRequest) -> None:
    report = run(request_, show_progress=False)
    found = load_file(request_.output)
    assert list(found) == ["y"]
    assert found["y"].dtype == torch.float32
    assert distance(found["y"], reference(request_)) <= 4e-3
    assert json.loads(json.dumps(report)) == report
    for name, value in {
        "schema": "trellis-moe/run", "schema_version": 1, "layer": 0, "tp_rank": 0, "tp_size": 1, "codebook": "mul1",
        "rates": [1, 2.5, 4], "activation": "silu", "io_dtype": "bfloat16", "channels": [0, 384], "tokens": 7,
        "top_k": 2, "device": "cpu", "output": str(request_.output), "non_finite_tokens": 0, "warnings": [],
        "activation_constants": {"limit": None, "alpha": 1.0, "beta": 0.0},
    }.items():  # fmt: skip
        assert report[name] == value, name
    assert report["geometry"] == {
        "num_experts": 3, "hidden_size": 128, "intermediate_size": 300, "padded_hidden_size": 128,
        "padded_intermediate_size": 384, "projections": ["gate", "up", "down"],
    }  # fmt: skip
    assert report["code_bytes"] == int(7.5 * 3 * 128 * 384 / 8)
    assert report["prepared_bytes"] > report["code_bytes"]
    assert set(report["seconds"]) == {"open", "prepare", "run"}


def test_ranks_write_their_share(request_: RunRequest) -> None:
    total = torch.zeros(7, 128, dtype=torch.float64)
    for rank in range(3):
        report = run(replace(request_, rank=rank, world_size=3), show_progress=False)
        assert report["channels"] == [128 * rank, 128 * (rank + 1)]
        total += load_file(request_.output)["y"]
    run(request_, show_progress=False)
    assert distance(total, load_file(request_.output)["y"]) <= 1e-6


def test_an_activation_can_be_given(request_: RunRequest) -> None:
    report = run(replace(request_, activation="situ"), show_progress=False)
    assert report["activation"] == "situ"
    assert distance(load_file(request_.output)["y"], reference(request_)) > 0.01


@pytest.mark.parametrize(
    ("config", "limit"), [({"hidden_act": "silu"}, 7.0), ({"model_type": "gpt_oss", "swiglu_limit": 0.25}, 0.25)]
)
def test_swigluoai_is_its_own_law_and_not_silu(request_: RunRequest, config: dict[str, object], limit: float) -> None:
    exl3_files.write_json(request_.checkpoint / "config.json", config)
    given = load_file(request_.input)
    write_input(request_.input, **given | {"x": given["x"] * 16})
    report = run(replace(request_, activation="swigluoai"), show_progress=False)
    assert report["activation"] == "swigluoai"
    assert report["activation_constants"] == {"limit": limit, "alpha": 1.702, "beta": 1.0}
    found = load_file(request_.output)["y"]
    law = Activation("swigluoai", limit=limit, alpha=1.702, beta=1.0)
    assert distance(found, reference(request_, law)) <= 4e-3
    assert distance(found, reference(request_, Activation("silu"))) > 0.1
    assert distance(found, reference(request_, replace(law, limit=7.25 - limit))) > 0.01


def test_warnings_are_told_before_the_work_and_kept_in_the_report(
    request_: RunRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"hidden_act": "silu", "hidden_size": 512, "num_experts": 2}
    exl3_files.write_json(request_.checkpoint / "config.json", config)
    told: list[str] = []
    report = run(request_, show_progress=False, warn=told.append)
    assert len(told) == 2
    assert report["warnings"] == told == run(request_, show_progress=False)["warnings"]
    assert "hidden_size = 512" in told[0]
    assert "2 experts" in told[1]

    def fail(*args: object, **kwargs: object) -> None:
        raise MoeValueError("work began")

    monkeypatch.setattr(module, "run_layer", fail)
    with pytest.raises(MoeValueError, match="work began"):
        run(request_, show_progress=False, warn=told.append)
    assert len(told) == 4
    with pytest.raises(ValueError, match="1 to 3"):  # a refusal of the request stays alone
        run(replace(request_, world_size=4), show_progress=False, warn=told.append)
    assert len(told) == 4


@pytest.mark.parametrize("name", ["checkpoint", "input", "output"])
def test_a_path_with_a_nul_is_refused(request_: RunRequest, name: str) -> None:
    with pytest.raises(MoeValueError, match="a path cannot hold a NUL, this one has it at index 1"):
        run(replace(request_, **{name: Path("a\0b")}), show_progress=False)
    assert not request_.output.exists()


def test_tokens_that_are_not_finite_are_counted(request_: RunRequest) -> None:
    given = load_file(request_.input)
    given["x"][3] = float("nan")
    given["x"][5, 7] = float("inf")
    write_input(request_.input, **given)
    report = run(request_, show_progress=False)
    finite = torch.isfinite(load_file(request_.output)["y"]).all(dim=1)
    assert report["non_finite_tokens"] == 2
    assert (~finite).nonzero().flatten().tolist() == [3, 5]


def test_everything_is_checked_before_work_begins(request_: RunRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr(module, "run_layer", fail)
    given = load_file(request_.input)
    write_input(request_.input, **given | {"topk_ids": given["topk_ids"] + 1})
    with pytest.raises(MoeValueError, match="id 3 at token"):
        run(request_, show_progress=False)
    for changes in ({"rank": 3, "world_size": 3}, {"world_size": 4}, {"output": request_.input}):
        with pytest.raises(ValueError, match=r"rank|ranks|input file"):
            run(replace(request_, **changes), show_progress=False)
    assert not request_.output.exists()


def test_an_interrupt_leaves_no_file(request_: RunRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(os.listdir(request_.output.parent))

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_layer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(request_, show_progress=False)
    assert sorted(os.listdir(request_.output.parent)) == before
