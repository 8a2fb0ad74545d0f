"""Holds the plugin for vLLM to the float64 reference, on stand-ins that have the signatures of vLLM's hooks.

tests/integration/test_vllm.py runs it in vLLM itself, where that is installed.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import inspect
import json
import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import trellis_moe
import vllm_hooks
from exl3_files import random_linear, write_checkpoint
from trellis_format import open_layer_source
from trellis_format.checkpoint import open_checkpoint
from trellis_format.exl3.layers import group_modules
from trellis_format.exl3.linear import describe_linear
from trellis_format.reference import linear, moe_forward
from trellis_moe.errors import MoeUnsupportedError, MoeValueError

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tests/data/checkpoints/tiny_3_mul1"
SOURCE = Path(inspect.getfile(trellis_moe)).parent / "integrations/vllm.py"
ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def plugin() -> Iterator[ModuleType]:
    """The plugin over the stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in vllm_hooks.stand_ins().items():
            patch.setitem(sys.modules, name, module)
        spec = importlib.util.spec_from_file_location("trellis_vllm_on_stand_ins", SOURCE)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


def configure(plugin: ModuleType, path: Path, *, packed: dict[str, list[str]] | None = None) -> Any:
    """What vLLM makes of a checkpoint's configuration."""
    config = plugin.Exl3Config.from_config({"quant_method": "exl3", "bits": 3.0})
    config.maybe_update_config(str(path), hf_config=None, revision=None)
    config.packed_modules_mapping = packed or {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return config


def product(path: Path, name: str, x: np.ndarray) -> np.ndarray:
    """The float64 reference of one stored linear, over all of its channels; x may lack channels at the end."""
    with open_checkpoint(path) as checkpoint:
        stored = describe_linear(name, group_modules(checkpoint.tensors).linears[name])
        padded = np.pad(x, ((0, 0), (0, stored.k - x.shape[1])))
        scales = stored.read_input_scale(), stored.read_output_scale()
        return linear(padded, stored.trellis.read(), *scales, stored.codebook.name, stored.rate)


def inputs(channels: int, rows: int = 3) -> torch.Tensor:
    """Values that float16 holds, so that a test's reference sees what the plugin sees."""
    return torch.randn(rows, channels, generator=torch.Generator().manual_seed(channels)).half()


def make(plugin: ModuleType, config: Any, layer: Any, prefix: str, sizes: list[int], k: int, total: int) -> Any:
    """A linear of one rank, as vLLM makes and loads it: sizes of its outputs, of its inputs, of all ranks' outputs."""
    method = config.get_quant_method(layer, prefix)
    assert isinstance(method, plugin.Exl3LinearMethod)
    method.create_weights(layer, k, sizes, getattr(layer, "whole_inputs", k), total, torch.float16, weight_loader=None)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # vLLM may call it twice
    return method


def difference(found: torch.Tensor, expected: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found.double().numpy() - expected) / np.linalg.norm(expected))


def test_stand_ins_have_the_recorded_signatures() -> None:
    modules, record = vllm_hooks.stand_ins(), vllm_hooks.read_record()
    for hook, parameters in record["signatures"].items():
        home, _, name = hook.rpartition(":")
        owner, _, method = name.partition(".")
        found = getattr(modules[home], owner)
        assert vllm_hooks.parameters_of(getattr(found, method) if method else found) == parameters, hook


def test_plugin_takes_every_call_that_vllm_makes(plugin: ModuleType) -> None:
    ours = {
        "QuantizationConfig": plugin.Exl3Config,
        "LinearMethodBase": plugin.Exl3LinearMethod,
        "FusedMoEMethodBase": plugin.Exl3MoEMethod,
    }
    compared = 0
    for hook, parameters in vllm_hooks.read_record()["signatures"].items():
        owner, _, method = hook.rpartition(":")[2].partition(".")
        if owner in ours and method != "__init__":
            found = vllm_hooks.parameters_of(getattr(ours[owner], method))
            assert [each.rstrip("=") for each in found] == [each.rstrip("=") for each in parameters], hook
            assert not [each for each in parameters if each.endswith("=") and each not in found], hook
            compared += 1
    assert compared == 15


def test_record_is_of_the_installed_vllm() -> None:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is an extra of trellis-moe")
    code = "import json, vllm_hooks; print(json.dumps(vllm_hooks.describe()))"  # here, stand-ins are in its place
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == vllm_hooks.read_record()


def test_trellis_imports_without_vllm() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import trellis_moe, trellis_moe.cli, trellis_moe.module, trellis_moe.linear, trellis_moe.integrations\n"
        "trellis_moe.bind; print('trellis_moe.integrations.vllm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_entry_point_is_declared() -> None:
    table = tomllib.loads((ROOT / "packages/trellis-moe/pyproject.toml").read_text())["project"]
    assert table["entry-points"]["vllm.general_plugins"] == {"trellis": "trellis_moe.integrations.vllm:register"}
    minor = vllm_hooks.read_record()["vllm"].rpartition(".")[0]
    assert table["optional-dependencies"]["vllm"] == [f"vllm~={minor}.0"]


def test_register_names_the_method(plugin: ModuleType) -> None:
    plugin.register()
    plugin.register()
    assert {"exl3": plugin.Exl3Config} == vllm_hooks.REGISTERED
    config = plugin.Exl3Config.from_config({"quant_method": "exl3"})
    assert config.get_name() == "exl3"
    assert config.get_supported_act_dtypes() == [torch.float16, torch.bfloat16]
    assert config.get_min_capability() == 80


def test_stream_keeps_what_is_not_quantised_and_nothing_else(plugin: ModuleType) -> None:
    mapper = plugin.Exl3Config.get_checkpoint_weight_mapper()
    with open_checkpoint(TINY) as checkpoint:
        kept = {name for name in checkpoint.tensors if mapper.map_name(name) is not None}
        assert kept == set(group_modules(checkpoint.tensors).others)
        assert checkpoint.bytes_read == 0
    assert mapper.map_name(f"{ATTENTION}.q_proj.bias") is not None


def test_methods_follow_the_checkpoint(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    assert isinstance(
        config.get_quant_method(vllm_hooks.LinearBase(), f"{ATTENTION}.qkv_proj"), plugin.Exl3LinearMethod
    )
    assert isinstance(config.get_quant_method(vllm_hooks.ParallelLMHead(), "lm_head"), plugin.Exl3LinearMethod)
    assert isinstance(config.get_quant_method(vllm_hooks.RoutedExperts(), EXPERTS), plugin.Exl3MoEMethod)
    nested = f"{EXPERTS}.routed_experts"
    assert isinstance(config.get_quant_method(vllm_hooks.RoutedExperts(), nested), plugin.Exl3MoEMethod)
    router = config.get_quant_method(vllm_hooks.LinearBase(), "model.layers.0.mlp.gate")
    assert isinstance(router, vllm_hooks.UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Module(), "model.embed_tokens") is None
    assert config.get_quant_method(vllm_hooks.ParallelLMHead(), "model.embed_tokens") is None  # tied, not quantised


@pytest.mark.parametrize("prefix", ["model.layers.7.mlp.experts", f"{ATTENTION}.absent_proj", "language_model.lm_head"])
def test_modules_that_the_checkpoint_has_nothing_of_are_refused(plugin: ModuleType, prefix: str) -> None:
    layer = vllm_hooks.RoutedExperts() if prefix.endswith("experts") else vllm_hooks.LinearBase()
    with pytest.raises(MoeUnsupportedError, match=f"{prefix}: the checkpoint has neither codes nor weights"):
        configure(plugin, TINY).get_quant_method(layer, prefix)


def test_modules_that_are_not_quantised_stay_vllms(plugin: ModuleType, tmp_path: Path) -> None:
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.experts.0.down_proj")
    plain = {f"model.layers.0.{name}.weight": np.zeros((2, 2), np.float16) for name in names}
    rest = random_linear(np.random.default_rng(0), "lm_head", 128, 128)
    config = configure(plugin, write_checkpoint(tmp_path, plain | rest))
    joined = config.get_quant_method(vllm_hooks.LinearBase(), f"{ATTENTION}.qkv_proj")
    assert isinstance(joined, vllm_hooks.UnquantizedLinearMethod)
    assert config.get_quant_method(vllm_hooks.RoutedExperts(), f"{EXPERTS}.routed_experts") is None


def test_configuration_can_be_copied_and_sent(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    load_experts(config, vllm_hooks.RoutedExperts(describe()))
    for again in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert "stored" not in vars(again)
        assert not again._arenas
        assert isinstance(again.get_quant_method(vllm_hooks.RoutedExperts(), EXPERTS), plugin.Exl3MoEMethod)


def test_names_follow_the_models_mapping(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    stacked = {".q_proj": (".qkv_proj", "q")}
    prefixes = {"model.": "language_model.model."}
    config.apply_vllm_mapper(vllm_hooks.WeightsMapper(orig_to_new_prefix=prefixes, orig_to_new_stacked=stacked))
    method = config.get_quant_method(vllm_hooks.LinearBase(), f"language_model.{ATTENTION}.qkv_proj")
    assert method._names == tuple(f"{ATTENTION}.{name}_proj" for name in "qkv")


def test_modules_that_are_quantised_in_part_are_refused(plugin: ModuleType) -> None:
    config = configure(plugin, TINY, packed={"mixed": ["q_proj", "absent_proj"]})
    with pytest.raises(MoeUnsupportedError, match=r"joins 2 linears of which 1 are quantised; .*absent_proj is not"):
        config.get_quant_method(vllm_hooks.LinearBase(), f"{ATTENTION}.mixed")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_joined_outputs_are_those_of_every_rank(plugin: ModuleType, ranks: int) -> None:
    x, found = inputs(256), []
    config = configure(plugin, TINY)
    for rank in range(ranks):
        layer = vllm_hooks.LinearBase(rank, ranks)
        sizes = [256 // ranks, 128 // ranks, 128 // ranks]  # over 2 and 4 ranks inside blocks of 128
        method = make(plugin, config, layer, f"{ATTENTION}.qkv_proj", sizes, 256, 512)
        assert not list(layer.parameters())
        found.append(method.apply(layer, x).split(sizes, dim=-1))
    for place, name in enumerate("qkv"):
        joined = torch.cat([parts[place] for parts in found], dim=-1)
        assert difference(joined, product(TINY, f"{ATTENTION}.{name}_proj", x.double().numpy())) < 1e-3


def test_ranks_that_share_heads_of_k_and_v_hold_the_same(plugin: ModuleType) -> None:
    x, config, found = inputs(256), configure(plugin, TINY), []
    for rank in range(4):  # two heads of 64 in k and v, each on two ranks
        layer = vllm_hooks.LinearBase(rank, 4, num_kv_head_replicas=2)
        method = make(plugin, config, layer, f"{ATTENTION}.qkv_proj", [64, 64, 64], 256, 768)
        found.append(method.apply(layer, x).split(64, dim=-1))
    expected = product(TINY, f"{ATTENTION}.k_proj", x.double().numpy())
    for rank, (_, k, _) in enumerate(found):
        assert difference(k, expected[:, rank // 2 * 64 : (rank // 2 + 1) * 64]) < 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_the_inputs_add_up(plugin: ModuleType, ranks: int) -> None:
    x, config = inputs(256), configure(plugin, TINY)
    total, bias = torch.zeros(3, 256, dtype=torch.float64), torch.arange(256).half()
    for rank in range(ranks):
        layer = vllm_hooks.LinearBase(rank, ranks)
        layer.whole_inputs, width = 256, 256 // ranks
        method = make(plugin, config, layer, f"{ATTENTION}.o_proj", [256], width, 256)
        y = method.apply(layer, x[:, rank * width : (rank + 1) * width], bias if rank == 0 else None)
        total += y.double()
    expected = product(TINY, f"{ATTENTION}.o_proj", x.double().numpy()) + bias.double().numpy()
    assert difference(total, expected) < 1e-3


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_linear_may_hold_all_outputs(plugin: ModuleType, tmp_path: Path, ranks: int) -> None:
    write_checkpoint(tmp_path, random_linear(np.random.default_rng(2), "mlp.gate_up_proj", 128, 512))
    x, config, found = inputs(128), configure(plugin, tmp_path), []
    for rank in range(ranks):
        layer = vllm_hooks.LinearBase(rank, ranks)
        sizes = [256 // ranks, 256 // ranks]
        found.append(make(plugin, config, layer, "mlp.gate_up_proj", sizes, 128, 512).apply(layer, x).chunk(2, dim=-1))
    joined = torch.cat([parts[place] for place in range(2) for parts in found], dim=-1)
    assert difference(joined, product(tmp_path, "mlp.gate_up_proj", x.double().numpy())) < 1e-3


def test_head_is_padded_with_zeros(plugin: ModuleType) -> None:
    x, config = inputs(256), configure(plugin, TINY)
    expected = product(TINY, "lm_head", x.double().numpy())
    for start, stop in ((0, 192), (192, 384), (384, 576), (576, 768)):  # 512 stored entries on four ranks
        layer = vllm_hooks.ParallelLMHead(start)
        y = make(plugin, config, layer, "lm_head", [stop - start], 256, 768).apply(layer, x)
        stored = np.pad(expected, ((0, 0), (0, 256)))[:, start:stop]
        assert np.abs(y.double().numpy() - stored).max() < 2e-3 * np.abs(expected).max()
        assert not y[:, max(512 - start, 0) :].any()
    method = config.get_quant_method(vllm_hooks.ParallelLMHead(), "lm_head")
    assert method.tie_weights(layer, torch.nn.Embedding(512, 256)) is layer


def test_linears_that_do_not_fit_are_refused(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    for sizes, k, match in (
        ([512], 256, "o_proj has 256 output channels, vLLM's module 512"),
        ([256], 512, "o_proj has 256 input channels, vLLM's module 512"),
    ):
        with pytest.raises(MoeValueError, match=match):
            make(plugin, config, vllm_hooks.LinearBase(), f"{ATTENTION}.o_proj", sizes, k, sizes[0])
    with pytest.raises(MoeValueError, match="3 linears are stored for the 2 outputs"):
        make(plugin, config, vllm_hooks.LinearBase(), f"{ATTENTION}.qkv_proj", [256, 128], 256, 384)


def describe(tokens: int = 8, **shares: Any) -> SimpleNamespace:
    """What vLLM says of a layer of `TINY` on a rank."""
    parallel = SimpleNamespace(**({"tp_rank": 0, "tp_size": 1, "dp_size": 1, "use_ep": False} | shares))
    return SimpleNamespace(
        num_experts=8, hidden_dim=256, experts_per_token=2, max_num_tokens=tokens, moe_parallel_config=parallel
    )


def load_experts(config: Any, layer: Any, *, dtype: torch.dtype = torch.float16) -> Any:
    """The experts of one rank, as vLLM makes and loads them."""
    method = config.get_quant_method(layer, EXPERTS)
    method.create_weights(layer, 8, 256, 128, dtype, weight_loader=None, global_num_experts=8)
    before = config.stored.bytes_read
    method.process_weights_after_loading(layer)
    layer.was_read = config.stored.bytes_read - before
    method.process_weights_after_loading(layer)
    assert method.get_fused_moe_quant_config(layer) is None
    assert method.maybe_roundup_sizes(256, 192, dtype, None) == (256, 192)
    return method


def routes() -> tuple[torch.Tensor, torch.Tensor]:
    """Routes of five tokens, one of them to nobody."""
    weights, ids = torch.rand(5, 8, generator=torch.Generator().manual_seed(1)).topk(2)
    ids[3, 1] = -1
    return weights, ids.to(torch.int32)


def expected_experts(x: torch.Tensor) -> np.ndarray:
    """The float64 reference of the layer."""
    weights, ids = routes()
    source, arrays = open_layer_source(TINY, 0)
    return moe_forward(source, arrays, x.double().numpy(), ids.numpy(), weights.double().numpy())


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shares_of_the_experts_add_up(plugin: ModuleType, ranks: int) -> None:
    x, (weights, ids), config = inputs(256, 5), routes(), configure(plugin, TINY)
    total, was_read = torch.zeros(5, 256, dtype=torch.float64), []
    for rank in range(ranks):
        layer = vllm_hooks.RoutedExperts(describe(tp_rank=rank, tp_size=ranks))
        method = load_experts(config, layer)
        assert method.topk_indices_dtype is torch.int32
        y = method.apply(layer, x, weights, ids, shared_experts=None, shared_experts_input=None)
        assert y.dtype is torch.float16
        total += y.double()
        was_read.append(layer.was_read)
    assert difference(total, expected_experts(x)) < 2e-3
    blocks = [3, 2, 1, 1][ranks - 1]  # of 128 channels, on the first rank; a fourth has none
    assert layer.trellis.prepared.extent.slot_count == (0 if ranks == 4 else [12, 4, 4][ranks - 1])
    assert was_read[0] < 0.36 * blocks * 915_552


@pytest.mark.parametrize(
    "maps", [([0, 1, 2, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 0, 1, 2, 3]), ([0, -1] * 4, [-1, 0] * 4)]
)
def test_whole_experts_add_up(plugin: ModuleType, maps: tuple[list[int], list[int]]) -> None:
    x, (weights, ids), config = inputs(256, 5), routes(), configure(plugin, TINY)
    total = torch.zeros(5, 256, dtype=torch.float64)
    for given in maps:
        places = iter(range(4))
        table = [next(places) if place >= 0 else -1 for place in given]
        layer = vllm_hooks.RoutedExperts(describe(use_ep=True), table)
        total += load_experts(config, layer).apply(layer, x, weights, ids, None, None).double()
        assert layer.was_read < 0.52 * 915_552  # scales are read with the descriptions
    assert difference(total, expected_experts(x)) < 2e-3


def test_route_weights_may_belong_to_inputs(plugin: ModuleType) -> None:
    x, (weights, ids) = inputs(256, 5), routes()
    layer = vllm_hooks.RoutedExperts(describe(), weighs_inputs=True)
    layer.moe_config.experts_per_token = 1
    y = load_experts(configure(plugin, TINY), layer).apply(layer, x, weights[:, :1], ids[:, :1], None, None)
    source, arrays = open_layer_source(TINY, 0)
    weighted = x.double().numpy() * weights[:, :1].double().numpy()
    assert difference(y, moe_forward(source, arrays, weighted, ids[:, :1].numpy(), np.ones((5, 1)))) < 2e-3


def test_layers_share_one_scratch_and_plan_small_steps(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    layers = [vllm_hooks.RoutedExperts(describe(tokens=40, dp_size=2)) for _ in range(2)]
    for layer in layers:
        load_experts(config, layer, dtype=torch.bfloat16)
    plans = [layer.trellis.plan.execution for layer in layers]
    assert plans[0].capacity.max_tokens == 80
    assert plans[0].capacity.token_counts == (1, 2, 4, 8, 16, 32, 64)
    assert plans[0].activation.io_dtype == "bfloat16"
    sizes = [plan.required_nbytes() for plan in plans]
    given = [config.arena(torch.device("cpu"))(size) for size in (*sizes, sizes[0] + 1)]
    assert given[0].data_ptr() == given[1].data_ptr() != given[2].data_ptr()
    assert given[0].numel() == max(sizes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"num_experts": 9}, "experts 8 in the checkpoint, 9 in vLLM's layer"),
        ({"hidden_dim": 384}, "hidden 256 in the checkpoint, 384 in vLLM's layer"),
    ],
)
def test_layers_that_do_not_fit_are_refused(plugin: ModuleType, change: dict[str, int], match: str) -> None:
    moe = SimpleNamespace(**(vars(describe()) | change))
    with pytest.raises(MoeValueError, match=match):
        load_experts(configure(plugin, TINY), vllm_hooks.RoutedExperts(moe))


def test_what_a_layer_cannot_be_asked_for_is_refused(plugin: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(plugin, TINY)
    with pytest.raises(MoeUnsupportedError, match=r"experts \[0, 1, 3\] of a rank"):
        load_experts(config, vllm_hooks.RoutedExperts(describe(use_ep=True), [0, 1, -1, 2, -1, -1, -1, -1]))
    monkeypatch.setattr(vllm_hooks.CONFIG.parallel_config, "enable_dbo", True)
    with pytest.raises(MoeUnsupportedError, match="turn --enable-dbo off"):
        load_experts(config, vllm_hooks.RoutedExperts(describe()))


@pytest.mark.gpu
def test_a_cuda_graph_holds_linears_and_experts(plugin: ModuleType) -> None:
    config = configure(plugin, TINY)
    weights, ids = (tensor.cuda() for tensor in routes())
    with torch.device("cuda"):  # as vLLM builds a model
        experts, joined = vllm_hooks.RoutedExperts(describe()), vllm_hooks.LinearBase()
        moe = load_experts(config, experts)
        qkv = make(plugin, config, joined, f"{ATTENTION}.qkv_proj", [256, 128, 128], 256, 512)
    x = torch.zeros(5, 256, dtype=torch.float16, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as vLLM's profile run does, once before a capture
        moe.apply(experts, x, weights, ids, None, None), qkv.apply(joined, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = moe.apply(experts, x, weights, ids, None, None), qkv.apply(joined, x)
    x.copy_(inputs(256, 5))
    for tensor in found:
        tensor.fill_(float("nan"))
    graph.replay()
    y, heads = (tensor.cpu() for tensor in found)
    assert difference(y, expected_experts(x.cpu())) < 2e-3
    for name, part in zip("qkv", heads.split([256, 128, 128], dim=-1), strict=True):
        assert difference(part, product(TINY, f"{ATTENTION}.{name}_proj", x.double().cpu().numpy())) < 1e-3


def test_a_compiled_graph_holds_linears(plugin: ModuleType) -> None:
    config, x = configure(plugin, TINY), inputs(256)
    layer = vllm_hooks.LinearBase(1, 4)  # parts that begin and end inside blocks
    method = make(plugin, config, layer, f"{ATTENTION}.qkv_proj", [64, 32, 32], 256, 512)
    compiled = torch.compile(
        lambda given: method.apply(layer, given), fullgraph=True, backend="aot_eager", dynamic=True
    )
    assert torch.equal(compiled(x), method.apply(layer, x))
    assert torch.equal(compiled(x[:2]), method.apply(layer, x[:2]))
    down = vllm_hooks.LinearBase(1, 4)
    down.whole_inputs = 256
    method = make(plugin, config, down, f"{ATTENTION}.o_proj", [256], 64, 256)
    compiled = torch.compile(lambda given: method.apply(down, given), fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(x[:, 64:128]), method.apply(down, x[:, 64:128]))
