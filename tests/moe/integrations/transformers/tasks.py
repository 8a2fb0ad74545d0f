"""Owns what the ranks of the tests do with a whole model.  It must not assert."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from trellis_moe.integrations.transformers import TrellisExperts, TrellisOptions, load_model


def shared_model(rank: int, world: int, path: Path) -> dict[str, torch.Tensor]:
    """Load a model whose experts the ranks share out; gives its logits, generated ids and the bytes of its experts."""
    options = TrellisOptions(max_tokens=16, scratch_bytes=1 << 22, group=dist.group.WORLD)
    model = load_model(path, options, dtype=torch.float32)
    ids = torch.arange(2, 9)[None]
    experts = [module.layer.prepared for module in model.modules() if isinstance(module, TrellisExperts)]
    with torch.no_grad():
        logits = model(ids).logits
    new = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    return {
        "logits": logits,
        "ids": new,
        "code_bytes": torch.tensor([layer.layout.code_bytes for layer in experts]),
        "channels": torch.tensor([[layer.extent.first_channel, layer.extent.end_channel] for layer in experts]),
    }
