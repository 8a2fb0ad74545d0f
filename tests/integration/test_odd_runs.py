"""Holds `trellis-moe run` to the reference on odd but sound input, and to leaving nothing when it is cut short."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import exl3_files
from integration.commands import Outcome, listing, run_here, run_process
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3 import trellis_from_exl3
from trellis_format.exl3.layers import find_layer
from trellis_format.reference import moe_forward
from trellis_moe.commands import files

SILU = {"model_type": "qwen3_moe", "hidden_act": "silu"}


def write_input(path: Path, experts: int, hidden: int, tokens: int, top_k: int, **changes: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(0)
    inputs = {
        "x": torch.randn(tokens, hidden, generator=generator).half() / 32,
        "topk_ids": torch.randint(-1, experts, (tokens, top_k), generator=generator),
        "topk_weights": torch.rand(tokens, top_k, generator=generator) + 0.1,
    }
    save_file({name: tensor.contiguous() for name, tensor in (inputs | changes).items()}, path)
    return path


def run(model: Path, source: Path, *options: object) -> tuple[torch.Tensor, dict[str, Any]]:
    output = source.with_name("y.safetensors")
    paths = ("--checkpoint", model, "--input", source, "--output", output)
    done = run_here("run", *paths, "--layer", 0, "--device", "cpu", "--json", *options)
    assert (done.code, done.err) == (0, ""), done
    return load_file(output)["y"], json.loads(done.out)


def truth(model: Path, source: Path) -> torch.Tensor:
    given = load_file(source)
    with open_checkpoint(model) as checkpoint:
        layer, weights = trellis_from_exl3(find_layer(checkpoint, 0))
        arrays = (given["x"].double().numpy(), given["topk_ids"].numpy(), given["topk_weights"].double().numpy())
        return torch.from_numpy(moe_forward(layer, weights, *arrays))


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


GEOMETRIES: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "one expert, 64 routes": ({"experts": 1, "hidden": 128, "intermediate": 128}, SILU, 3, 64),
    "300 experts": ({"experts": 300, "hidden": 128, "intermediate": 128, "bits": 1}, SILU, 5, 8),
    "one token": ({"experts": 4, "bits": 8, "codebook": "3inst"}, SILU, 1, 1),
    "a rate for each linear": (
        {"experts": 3, "codebook": "mul1", "bits": lambda expert, word: 1 + expert + len(word) % 2 / 2}, SILU, 9, 3,
    ),
    "no gate": ({"words": ("up_proj", "down_proj")}, {"mlp_hidden_act": "relu2"}, 9, 2),
    "float32 biases": ({"bias": np.float32}, {"model_type": "gpt_oss", "swiglu_limit": 3.0}, 9, 2),
    "packed signs": ({"packed": True}, SILU, 9, 2),
    "names of Mixtral": ({"words": ("w1", "w3", "w2")}, {"model_type": "mixtral", "hidden_act": "silu"}, 9, 2),
    "padded": ({"hidden": 256, "intermediate": 256},
               SILU | {"hidden_size": 130, "moe_intermediate_size": 250}, 9, 2),
    "up divided": ({}, SILU | {"model_type": "mistral4"}, 9, 2),
    "nested configuration": ({}, {"text_config": SILU}, 9, 2),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "config", "tokens", "top_k"), GEOMETRIES.values(), ids=GEOMETRIES)
def test_odd_layers_are_near_the_reference(
    tmp_path: Path, shape: dict[str, Any], config: dict[str, Any], tokens: int, top_k: int
) -> None:
    tensors = exl3_files.random_layer(np.random.default_rng(1), **shape)
    model = exl3_files.write_checkpoint(tmp_path / "model", tensors, config=config)
    hidden = config.get("hidden_size", shape.get("hidden", 128))
    source = write_input(tmp_path / "in", shape.get("experts", 2), hidden, tokens, top_k)
    y, report = run(model, source)
    assert y.shape == (tokens, hidden)
    assert distance(y, truth(model, source)) <= 1e-3
    assert report["geometry"]["num_experts"] == shape.get("experts", 2)
    blocks = report["geometry"]["padded_intermediate_size"] // 128
    parts = [run(model, source, "--tp-rank", rank, "--tp-size", blocks)[0] for rank in range(blocks)]
    assert distance(torch.stack(parts).double().sum(0), y.double()) <= 1e-6


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = exl3_files.random_layer(np.random.default_rng(2))
    return exl3_files.write_checkpoint(tmp_path / "model", tensors, config=SILU, shards=3, index=True)


def test_no_tokens_are_a_run(model: Path, tmp_path: Path) -> None:
    y, report = run(model, write_input(tmp_path / "in", 2, 128, 0, 3))
    assert (y.shape, report["tokens"]) == ((0, 128), 0)


def test_a_token_may_take_one_expert_many_times(model: Path, tmp_path: Path) -> None:
    ids, weights = torch.full((3, 4), 1), torch.full((3, 4), 0.25)
    four, _ = run(model, write_input(tmp_path / "in", 2, 128, 3, 4, topk_ids=ids, topk_weights=weights))
    once = {"topk_ids": ids[:, :1], "topk_weights": weights[:, :1] * 4}
    one, _ = run(model, write_input(tmp_path / "in", 2, 128, 3, 1, **once))
    assert torch.equal(one, four)


@pytest.mark.parametrize("size", [6e-8, 6e-5, 65504.0], ids=["subnormal", "small", "largest"])
def test_scales_at_the_ends_of_float16_are_no_crash(model: Path, tmp_path: Path, size: float) -> None:
    tensors = exl3_files.random_layer(np.random.default_rng(2))
    for name in [name for name in tensors if name.endswith("down_proj.svh")]:
        tensors[name] = (np.sign(tensors[name]) * size).astype(np.float16)  # type: ignore[arg-type]
    extreme = exl3_files.write_checkpoint(tmp_path / "extreme", tensors, config=SILU)
    source = write_input(tmp_path / "in", 2, 128, 5, 2)
    y, report = run(extreme, source)
    assert distance(y, truth(extreme, source)) <= 1e-3  # the output scale meets float32, so none of it is lost
    assert report["non_finite_tokens"] == 0


def test_what_leaves_float32_is_counted_not_hidden(tmp_path: Path) -> None:
    tensors = exl3_files.random_layer(np.random.default_rng(2))
    tensors |= {name: np.full_like(tensors[name], 65504) for name in tensors if name.endswith(".suh")}
    extreme = exl3_files.write_checkpoint(tmp_path / "extreme", tensors, config=SILU)
    ids = torch.tensor([[0, 1], [-1, -1], [1, 1]])
    x = torch.full((3, 128), 1e20)  # the law's product of gate and up is beyond float32
    y, report = run(extreme, write_input(tmp_path / "in", 2, 128, 3, 2, topk_ids=ids, x=x))
    assert report["non_finite_tokens"] == 2
    assert not y[1].any()


def test_weights_that_leave_float32_are_no_crash(model: Path, tmp_path: Path) -> None:
    weights = torch.full((3, 2), 3e38)
    _, report = run(model, write_input(tmp_path / "in", 2, 128, 3, 2, topk_weights=weights))
    assert 0 <= report["non_finite_tokens"] <= 3


def test_paths_of_any_text_serve(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a b [red]x[" / "mödel 模型 [nothing]"
    folder.parent.mkdir()
    model.rename(folder)
    source = write_input(folder.parent / "in put [y]", 2, 128, 3, 2)
    output = folder.parent / "ÿ [bold] .safetensors"
    for options in ([], ["--json"]):
        paths = ("--checkpoint", folder, "--input", source, "--output", output)
        done = run_here("run", *paths, "--layer", 0, "--device", "cpu", *options)
        assert (done.code, done.err) == (0, "")
    assert distance(load_file(output)["y"], truth(folder, source)) <= 1e-3


def test_a_checkpoint_of_links_that_may_only_be_read_serves(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        blob = tmp_path / "blobs" / str(number)
        blob.parent.mkdir(exist_ok=True)
        file.rename(blob)
        blob.chmod(0o400)
        (linked / file.name).symlink_to(Path("..") / "blobs" / str(number))
    linked.chmod(0o500)
    before = listing(linked)
    source = write_input(tmp_path / "in", 2, 128, 3, 2)
    y, _ = run(linked, source)
    assert distance(y, truth(linked, source)) <= 1e-3
    assert listing(linked) == before
    linked.chmod(0o700)


def test_a_run_into_the_input_s_folder_replaces_the_output_alone(model: Path, tmp_path: Path) -> None:
    source = write_input(tmp_path / "in", 2, 128, 3, 2)
    first, _ = run(model, source)
    before = listing(tmp_path)
    second, _ = run(model, source)
    assert torch.equal(first, second)
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    ("shell", "code", "err"),
    [
        (">&- 2>&-", 0, ""),
        (">/dev/full", 1, "trellis-moe: error: standard output: No space left on device\n"),
    ],
)
def test_a_stdout_that_takes_nothing_is_no_traceback(
    model: Path, tmp_path: Path, shell: str, code: int, err: str
) -> None:
    source = write_input(tmp_path / "in", 2, 128, 3, 2)
    paths = ("--checkpoint", model, "--input", source, "--output", tmp_path / "y")
    # An encoding without box-drawing characters, so that a table meets it too.
    environment = {"PYTHONIOENCODING": "ascii"}
    done = run_process("run", *paths, "--layer", 0, "--device", "cpu", shell=shell, env=environment)
    assert done == Outcome(code, "", err)
    assert load_file(tmp_path / "y")["y"].shape == (3, 128)  # the work was done


def test_an_interrupt_is_one_line_and_leaves_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_input(tmp_path / "in", 2, 128, 3, 2)
    before = listing(tmp_path)

    def interrupted(tensors: dict[str, torch.Tensor], path: str) -> None:
        save_file(tensors, path)
        signal.raise_signal(signal.SIGINT)  # when the output is written under its temporary name

    monkeypatch.setattr(files, "save_file", interrupted)
    arguments = ("--checkpoint", model, "--input", source, "--output", tmp_path / "y")
    done = run_here("run", "--layer", 0, "--device", "cpu", *arguments)
    assert done == Outcome(130, "", "trellis-moe: interrupted\n")
    assert listing(tmp_path) == before
