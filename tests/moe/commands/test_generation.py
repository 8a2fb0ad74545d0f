"""Holds generation to transformers' own on the same model, to its report, and every refusal to one clear line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data_set import DataSet
from trellis_moe.commands.generation import GENERATE_SCHEMA, GenerateRequest, TokenWatch, generate
from trellis_moe.errors import MoeUnsupportedError, MoeValueError

pytest.importorskip("transformers", reason="transformers is an extra of trellis-moe")

NAME = "tiny_3_mul1"


class Letters:
    """A tokenizer of one letter an id; id 0 is special and id 9 is half of a character."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + number) for number in ids if number not in (0, 9)) + (
            "\N{REPLACEMENT CHARACTER}" if ids and ids[-1] == 9 else ""
        )


@pytest.fixture
def model(data_set: DataSet) -> Path:
    return data_set.root / "checkpoints" / NAME


def edited(source: Path, target: Path, **changes: Any) -> Path:
    """A copy without tokenizer, its configuration changed."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", target)
    return target


def test_tokens_are_those_that_transformers_generates(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    shown: list[str] = []
    report = generate(GenerateRequest(model=model, prompt="Hello", device="cpu", max_new_tokens=5), show=shown.append)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("Hello", return_tensors="pt")
    whole = AutoModelForCausalLM.from_pretrained(model).generate(
        **ids, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    prompt = ids["input_ids"][0].tolist()
    assert report["prompt_ids"] == prompt
    assert report["new_ids"] == whole[0, len(prompt) :].tolist()
    assert report["text"] == "".join(shown) == tokenizer.decode(report["new_ids"], skip_special_tokens=True)
    assert (report["schema"], report["schema_version"]) == (GENERATE_SCHEMA, 1)
    assert (report["expert_layers"], report["linears"], report["dtype"]) == (2, 9, "float16")
    assert report["tokens_per_second"] == pytest.approx(4 / report["seconds"]["other_tokens"])
    assert json.loads(json.dumps(report)) == report


def test_ids_need_no_tokenizer(model: Path, tmp_path: Path) -> None:
    bare = edited(model, tmp_path / "bare")
    shown: list[str] = []
    request = GenerateRequest(model=bare, ids=(3, 4, 5), device="cpu", dtype="float32", max_new_tokens=3)
    report = generate(request, show=shown.append)
    assert (len(report["new_ids"]), report["dtype"], report["prompt_ids"]) == (3, "float32", [3, 4, 5])
    assert "".join(shown) == report["text"] == " ".join(map(str, report["new_ids"]))
    with pytest.raises(MoeValueError, match=r"has no tokenizer \(tokenizer\.json, .*\); give token ids with --ids"):
        generate(GenerateRequest(model=bare, prompt="Hello", device="cpu"))


def test_draws_repeat_by_seed_and_a_static_cache_changes_nothing(model: Path) -> None:
    def new(**changes: Any) -> list[int]:
        given = {"temperature": 2.0, "seed": 5} | changes
        found: list[int] = generate(
            GenerateRequest(model=model, ids=(7,), device="cpu", max_new_tokens=6, dtype="float32", **given)
        )["new_ids"]
        return found

    first = new()
    assert new() == first
    assert new(seed=6) != first
    assert new(is_static=True) == first


def test_text_waits_for_whole_characters() -> None:
    shown: list[str] = []
    watch = TokenWatch(shown.append, Letters())
    watch.put(torch.tensor([[20, 21]]))  # the prompt
    for number in (1, 9, 2, 0, 9):
        watch.put(torch.tensor([number]))
    assert shown == ["a", "b"]
    watch.end()
    assert "".join(shown) == watch.text
    assert watch.ids == [1, 9, 2, 0, 9]
    assert len(watch.times) == 5
    assert watch.times == sorted(watch.times)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "neither of --prompt and --ids; give one"),
        ({"prompt": "a", "ids": (1,)}, "both of --prompt and --ids; give one"),
        ({"ids": ()}, "--ids has no token; give at least 1"),
        ({"prompt": "a", "max_new_tokens": 0}, "--max-new-tokens must be positive, got 0"),
        ({"prompt": "a", "temperature": -1.0}, "--temperature must be 0 or more and finite, got -1.0"),
        ({"prompt": "a", "temperature": float("nan")}, "--temperature must be 0 or more and finite, got nan"),
    ],
)
def test_requests_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(MoeValueError, match=message):
        GenerateRequest(model=Path(), **given)


def test_models_that_cannot_be_loaded_are_refused_at_once(model: Path, tmp_path: Path) -> None:
    def refused(path: Path, ids: tuple[int, ...] = (1,)) -> None:
        generate(GenerateRequest(model=path, ids=ids, device="cpu"))

    with pytest.raises(MoeValueError, match=r"has no config\.json, which says what model it is"):
        refused(tmp_path)
    with pytest.raises(MoeUnsupportedError, match="quant_method is None; whole models are loaded from 'exl3'"):
        refused(edited(model, tmp_path / "plain", quantization_config=None))
    with pytest.raises(MoeUnsupportedError, match=r"'nonesuch' is not in transformers .*; supported with .*qwen3_moe"):
        refused(edited(model, tmp_path / "unknown", model_type="nonesuch"))
    with pytest.raises(MoeValueError, match="token id 512 is outside the vocabulary of 512; ids are from 0"):
        refused(model, (3, 512))
    if not torch.cuda.is_available():
        with pytest.raises(MoeValueError, match="no CUDA device is visible"):
            generate(GenerateRequest(model=model, ids=(1,), device="cuda"))


def test_transformers_says_as_much_after_as_before(model: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    generate(GenerateRequest(model=model, ids=(1,), device="cpu", max_new_tokens=1))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
