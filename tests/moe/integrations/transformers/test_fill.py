"""Holds loaded models to float64 weights, to exllamav3's logits, to the staging bound, and to what generation needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from data_set import DataSet
from exl3_models import MODELS
from moe.integrations.transformers.tasks import shared_model
from moe.parallel.ranks import run_ranks
from trellis_format.checkpoint import Checkpoint
from trellis_moe.integrations.transformers import ARCHITECTURES, TrellisExperts, TrellisOptions, load_model
from trellis_moe.integrations.transformers import fill as fill_module
from trellis_moe.integrations.transformers import quantizer as quantizer_module
from trellis_moe.linear import TrellisLinear
from trellis_moe.module import TrellisMoE
from trellis_prep import TrellisStaging
from trellis_prep import slots as slots_module
from trellis_prep import stage as stage_module

Models = Callable[..., tuple[Path, Path]]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SMALL = {"max_tokens": 16, "scratch_bytes": 1 << 22}
# Each linear rounds its rotated input to float16, 2^-12 on average; about ten of them follow each other in a model.
BOUND_FLOAT32 = 2e-3
BOUND_PEER = 5e-3  # the peer rounds activations to float16 as well, at other places


def ids(tokens: int = 9) -> torch.Tensor:
    return torch.randint(0, 256, (2, tokens), generator=torch.Generator().manual_seed(0))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens.to(model.device)).logits
    return found.double().cpu()


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2."""
    return float((found - truth.double()).norm() / truth.double().norm())


def load(path: Path, device: str, **arguments: Any) -> Any:
    placement = {} if device == "cpu" else {"device_map": device}
    return load_model(path, TrellisOptions(**SMALL), **placement, **arguments)


def modules(model: nn.Module, kind: type[nn.Module]) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("model_type", MODELS)
def test_logits_of_every_architecture_are_those_of_its_weights(model_type: str, device: str, models: Models) -> None:
    quantised, plain = models(model_type, "mul1")
    truth = logits(AutoModelForCausalLM.from_pretrained(plain), ids())
    model = load(quantised, device, dtype=torch.float32)
    assert distance(logits(model, ids()), truth) < BOUND_FLOAT32
    assert not [name for name in modules(model, nn.Linear) if "gate" not in name and "kv_" not in name]
    assert bool(modules(model, TrellisExperts)) == (model_type in ARCHITECTURES)


def test_every_supported_architecture_has_a_model() -> None:
    assert set(ARCHITECTURES) <= set(MODELS)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_no_router_leaves_the_choice_to_the_device(model_type: str, models: Models) -> None:
    model = AutoModelForCausalLM.from_pretrained(models(model_type, "mul1")[1])
    routed: list[torch.Tensor] = []
    for module in model.modules():
        if "Router" in type(module).__name__:
            module.register_forward_hook(lambda _module, _given, found: routed.append(found[0]))
    logits(model, ids())
    assert routed
    for scores in routed:
        ranked = scores.double().sort().values
        assert float(ranked.diff().min()) > 1e-6  # float32 of logits of about 1


@pytest.mark.parametrize("device", DEVICES)
def test_logits_are_those_of_exllamav3(device: str, data_set: DataSet) -> None:
    golden = load_file(data_set.root / "golden" / "exl3_moe.safetensors")
    names = [name.partition(".model.")[0] for name in golden if name.endswith(".model.n7.logits")]
    assert names
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(
            data_set.root / "checkpoints" / name, **({} if device == "cpu" else {"device_map": device})
        )
        assert model.dtype is torch.float16
        found = logits(model, golden[f"{name}.model.n7.ids"])
        assert distance(found, golden[f"{name}.model.n7.logits"]) <= BOUND_PEER, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 8e-3), (torch.bfloat16, 6e-2)])
def test_half_precision_models_stay_near(dtype: torch.dtype, bound: float, device: str, models: Models) -> None:
    quantised, plain = models("qwen3_moe")
    truth = logits(AutoModelForCausalLM.from_pretrained(plain), ids())
    model = load(quantised, device, dtype=dtype)
    assert model.dtype is dtype
    assert distance(logits(model, ids()), truth) < bound


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_each_code_is_read_once_and_within_the_bound(
    model_type: str, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Checkpoint] = []
    open_checkpoint = quantizer_module.open_checkpoint
    monkeypatch.setattr(
        quantizer_module, "open_checkpoint", lambda path: opened.append(open_checkpoint(path)) or opened[0]
    )
    quantised, _ = models(model_type)
    seen: list[tuple[str, int, int]] = []
    options = TrellisOptions(
        **SMALL, staging=TrellisStaging(max_bytes=1 << 17), progress=lambda *step: seen.append(step)
    )
    model = load_model(quantised, options)
    with safe_open(quantised / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if not name.endswith((".weight", ".e_score_correction_bias"))]  # noqa: SIM118  # not a dict
        stored = {name: file.get_slice(name) for name in names}
    codes = [name.removesuffix(".trellis") for name in names if name.endswith(".trellis")]
    mine = {name: part for name, part in stored.items() if name.rpartition(".")[0] in codes}
    width = {"I16": 2, "F16": 2, "F32": 4, "I32": 4}
    total = sum(int(torch.tensor(part.get_shape()).prod()) * width[part.get_dtype()] for part in mine.values())
    assert opened[0].bytes_read == total
    assert seen[-1][1:] == (total, total)
    assert len(seen) == len(modules(model, TrellisLinear)) + len(modules(model, TrellisExperts))


def test_no_module_holds_a_weight_of_what_is_quantised(models: Models) -> None:
    model = load(models("deepseek_v3")[0], "cpu")
    quantised = (*modules(model, TrellisLinear), *modules(model, TrellisExperts))
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        assert not name.startswith(quantised), name
        assert parameter.device.type == "cpu", name


def test_layers_share_one_scratch(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []

    class Watched(TrellisMoE):
        def __init__(self, *arguments: Any, scratch: Callable[[int], torch.Tensor], **keywords: Any) -> None:
            def noted(nbytes: int) -> torch.Tensor:
                given.append(scratch(nbytes))
                return given[-1]

            super().__init__(*arguments, scratch=noted, **keywords)

    monkeypatch.setattr(fill_module, "TrellisMoE", Watched)
    model = load(models("qwen3_moe")[0], "cpu")
    assert len(given) == len(modules(model, TrellisExperts)) == 2
    assert given[0] is given[1]


def test_all_weights_pass_through_one_staging_buffer(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    host_buffer = stage_module.HostBuffer

    def noted(nbytes: int, **keywords: Any) -> Any:
        taken.append(nbytes)
        return host_buffer(nbytes, **keywords)

    monkeypatch.setattr(stage_module, "HostBuffer", noted)
    monkeypatch.setattr(slots_module, "HostBuffer", noted)
    bound = 1 << 17
    model = load_model(models("qwen3_moe")[0], TrellisOptions(**SMALL, staging=TrellisStaging(max_bytes=bound)))
    assert taken == sorted(set(taken))  # it only ever grows, and the second layer finds it large enough
    assert taken[-1] <= bound
    assert len(taken) < len(modules(model, TrellisLinear))


def test_a_long_input_is_cut_into_launches(models: Models) -> None:
    quantised, plain = models("mixtral")
    truth = logits(AutoModelForCausalLM.from_pretrained(plain), ids(40))
    assert distance(logits(load(quantised, "cpu", dtype=torch.float32), ids(40)), truth) < BOUND_FLOAT32


def test_a_tied_head_that_is_quantised_has_its_own_codes(tmp_path: Path) -> None:
    from exl3_models import write_models

    quantised, plain = write_models(tmp_path, "qwen3_moe", codebook="3inst")
    config = (quantised / "config.json").read_text()
    (quantised / "config.json").write_text(
        config.replace('"tie_word_embeddings": false', '"tie_word_embeddings": true')
    )
    truth = logits(AutoModelForCausalLM.from_pretrained(plain), ids())
    assert distance(logits(load(quantised, "cpu", dtype=torch.float32), ids()), truth) < BOUND_FLOAT32


def test_a_whole_forward_is_one_graph(models: Models) -> None:
    model = load(models("qwen3_moe")[0], "cpu", dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        found = compiled(ids(), use_cache=False).logits
    assert torch.equal(found.double(), logits(model, ids()))


def test_a_static_cache_gives_the_tokens_of_a_growing_one(models: Models) -> None:
    model = load(models("glm4_moe")[0], "cpu", dtype=torch.float32)
    arguments = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    growing = model.generate(ids(5), **arguments)
    assert torch.equal(model.generate(ids(5), **arguments, cache_implementation="static"), growing)
    assert growing.shape == (2, 11)


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_out_the_experts(world: int, data_set: DataSet, tmp_path: Path) -> None:
    path = data_set.root / "checkpoints" / "tiny_3_mul1"
    ranks = run_ranks(tmp_path, world, shared_model, path)
    model = load(path, "cpu", dtype=torch.float32)
    experts = [model.get_submodule(name).layer.prepared for name in modules(model, TrellisExperts)]
    for found in ranks:
        assert torch.equal(found["logits"], ranks[0]["logits"])
        assert torch.equal(found["ids"], ranks[0]["ids"])
    assert distance(ranks[0]["logits"].double(), logits(model, torch.arange(2, 9)[None])) < BOUND_FLOAT32
    for index, whole in enumerate(experts):
        spans = [found["channels"][index].tolist() for found in ranks]
        assert [first for first, _ in spans] == [0, *(end for _, end in spans[:-1])]
        assert spans[-1][1] == whole.extent.width
        assert sum(int(found["code_bytes"][index]) for found in ranks) == whole.layout.code_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_a_static_cache_runs_in_cuda_graphs(model_type: str, models: Models) -> None:
    model = load(models(model_type)[0], "cuda", dtype=torch.float32)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = ids(5).cuda()
    growing = model.generate(prompt, **arguments)
    assert torch.equal(model.generate(prompt, **arguments, cache_implementation="static"), growing)
    assert model._compiled_call is not None
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
