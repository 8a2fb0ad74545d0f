"""Owns one forward of a whole model in vLLM itself, with trellis's plugin, against logits that were kept.

Needs vLLM, and runs with as many ranks as torchrun starts:

    torchrun --nproc-per-node 2 tests/vllm_model.py tests/data/checkpoints/tiny_3_mul1 [--expert-parallel]

Attention is torch's own, since vLLM's needs a cache that an engine fills; everything else is vLLM's model, its loader,
its layers and its collectives.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

GOLDEN = Path(__file__).parent / "data/golden/exl3_moe.safetensors"


def attend(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_more: Any, **_named: Any) -> Any:
    """Causal attention over one sequence, in place of vLLM's paged one."""
    q, k, v = (each.view(each.shape[0], -1, self.head_size).transpose(0, 1) for each in (query, key, value))
    y = torch.nn.functional.scaled_dot_product_attention(
        q[None].float(), k[None].float(), v[None].float(), is_causal=True, scale=self.impl.scale, enable_gqa=True
    )
    return y[0].transpose(0, 1).reshape(query.shape).to(query.dtype)


def build(checkpoint: Path, *, expert_parallel: bool) -> tuple[Any, Any]:
    """Configuration and loaded model of vLLM, on this rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    from trellis_moe.integrations.vllm import register

    load_general_plugins()
    register()  # also where the packages run from their sources, without entry points
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = EngineArgs(
        model=str(checkpoint),
        dtype="float16",
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},  # norms and rotary embeddings in torch
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        skip_tokenizer_init=True,
        tensor_parallel_size=world,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="external_launcher",
    ).create_engine_config()
    rank = int(os.environ.get("RANK", "0"))
    with set_current_vllm_config(config):
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        init_distributed_environment(world, rank, "env://", rank, backend)
        initialize_model_parallel(world)
        return config, get_model(vllm_config=config)


def logits(config: Any, model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits `[tokens, vocabulary]` of one sequence; on the first rank, None on others that gather there."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers.attention import Attention

    Attention.forward = attend
    with torch.inference_mode(), set_current_vllm_config(config), set_forward_context(None, config):
        hidden = model(ids, torch.arange(len(ids), device=ids.device))
        return model.compute_logits(hidden)


def main() -> None:
    """Print the error of the logits, and what was read, as JSON; rank 0 alone."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--expert-parallel", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29761")
    config, model = build(options.checkpoint, expert_parallel=options.expert_parallel)
    golden = load_file(GOLDEN)
    name = f"{options.checkpoint.name}.model.n7"
    device = config.device_config.device
    found = logits(config, model, golden[f"{name}.ids"][0].to(device))
    if int(os.environ.get("RANK", "0")) == 0:
        expected = golden[f"{name}.logits"][0]
        error = float((found.float().cpu() - expected).norm() / expected.norm())
        read = model.quant_config.stored.bytes_read
        print("RESULT", json.dumps({"error": error, "bytes_read": read}))


if __name__ == "__main__":
    main()
