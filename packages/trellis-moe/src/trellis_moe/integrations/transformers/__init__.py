"""Owns the door to Hugging Face transformers: once imported, `from_pretrained` loads EXL3 checkpoints.

It must not know how a model routes its tokens, which stays with the model.

    import trellis_moe.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, device_map="cuda")

Experts run through `trellis_moe.module.TrellisMoE`, every other quantised linear through
`trellis_moe.linear.TrellisLinear`; tensors that are not quantised are loaded by transformers.  `load_model` is the same
with options that `from_pretrained` has no argument for, such as a process group that shares out the experts.
"""

from __future__ import annotations

from importlib.util import find_spec

from trellis_moe.errors import MoeUnsupportedError

if find_spec("transformers") is None:
    raise MoeUnsupportedError("transformers is not installed; it is the extra `transformers` of trellis-moe")

from trellis_moe.integrations.transformers.experts import TrellisExperts
from trellis_moe.integrations.transformers.options import TrellisOptions, load_model
from trellis_moe.integrations.transformers.quantizer import METHOD, Exl3Config, Exl3Quantizer
from trellis_moe.integrations.transformers.skeleton import ARCHITECTURES

__all__ = [
    "ARCHITECTURES",
    "METHOD",
    "Exl3Config",
    "Exl3Quantizer",
    "TrellisExperts",
    "TrellisOptions",
    "load_model",
]
