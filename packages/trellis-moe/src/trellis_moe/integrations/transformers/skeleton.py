"""Owns which modules of a model a checkpoint's codes go to, found on the skeleton before any weight is read.

It must not know devices, nor how weights get to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from trellis_format.checkpoint import CONFIG_NAME, Checkpoint
from trellis_format.exl3.adapter import layer_geometry
from trellis_format.exl3.declared import read_declared
from trellis_format.exl3.layers import Exl3Layer, build_layer, example_trellis, find_layers, group_modules
from trellis_format.exl3.linear import LINEAR_SUFFIXES, Exl3Linear, describe_linear
from trellis_format.model_config import parse_model_config
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.integrations.transformers.names import ModelNames

__all__ = [
    "ARCHITECTURES",
    "PendingModule",
    "PlacedExperts",
    "PlacedLinear",
    "Skeleton",
    "place_modules",
]

ARCHITECTURES = (
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
"""`model_type` of the models with experts that are loaded; models without experts are not limited."""
_TOP_K_KEYS = ("num_experts_per_tok", "moe_k", "moe_topk")


class PendingModule(nn.Module):
    """Stands for a module while transformers loads the others: it has no weight that could be missing."""

    def forward(self, *_given: object, **_keywords: object) -> NoReturn:
        """Refuse.

        Raises:
            MoeValueError: always; the model was not loaded to its end.
        """
        raise MoeValueError("this module's weight was not prepared: the model's loading did not come to its end")


@dataclass(frozen=True)
class PlacedLinear:
    """A quantised linear and the module that it becomes.

    Attributes:
        path: of the module in the model.
        linear: its headers.
        in_features: true input channels.
        out_features: true output channels.
    """

    path: str
    linear: Exl3Linear
    in_features: int
    out_features: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors in the checkpoint."""
        return self.linear.nbytes


@dataclass(frozen=True)
class PlacedExperts:
    """A layer of quantised experts and the module that they become.

    Attributes:
        path: of the module in the model.
        layer: the experts' headers.
        top_k: experts of a token.
    """

    path: str
    layer: Exl3Layer
    top_k: int

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors in the checkpoint."""
        return sum(linear.nbytes for row in self.layer.experts for linear in row.values())


@dataclass(frozen=True)
class Skeleton:
    """What of a model is quantised.

    Attributes:
        linears: outside the experts.
        experts: one for each layer that has them.
    """

    linears: tuple[PlacedLinear, ...]
    experts: tuple[PlacedExperts, ...]

    def ignored_patterns(self) -> set[str]:
        """Regular expressions of the tensors that transformers must not miss a module for, by the model's names.

        Layers differ in their index alone, so that a model of any depth has a few of these.
        """
        suffixes = "|".join(LINEAR_SUFFIXES)
        paths = {re.escape(placed.path) for placed in self.linears}
        paths |= {re.escape(placed.path) + r"\.\d+\.\w+" for placed in self.experts}
        return {"^" + re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", path) + rf"\.({suffixes})$" for path in paths}


def place_modules(model: PreTrainedModel, checkpoint: Checkpoint) -> Skeleton:
    """Find the module of every quantised linear and put a placeholder there.

    Linears that the model has no module for, such as those of layers that only other engines run, are left to
    transformers, which reports them.

    Args:
        model: on the meta device; its quantised modules are replaced.
        checkpoint: opened.

    Raises:
        FormatError: if the checkpoint breaks a rule.
        MoeUnsupportedError: if the architecture's experts are not supported; lists those that are.
        MoeValueError: if a linear or the experts do not fit their module; names both.
    """
    declared = read_declared(checkpoint)
    declared.check_method(example_trellis(checkpoint.tensors))
    modules = group_modules(checkpoint.tensors).linears
    described = {name: describe_linear(name, tensors) for name, tensors in modules.items()}
    for linear in described.values():
        declared.check_linear(linear)
    names = ModelNames(model)
    experts, in_layers = _place_experts(model, checkpoint, names, described)
    linears = _place_linears(names, {name: each for name, each in described.items() if name not in in_layers})
    for path in [*(placed.path for placed in experts), *(placed.path for placed in linears)]:
        model.set_submodule(path, PendingModule())
    if not experts and not linears:
        count = len(described)
        raise MoeValueError(f"{type(model).__name__} has a module for none of the checkpoint's {count} linears")
    _forget_ties(model)
    _check_no_experts_are_left(model)
    return Skeleton(tuple(linears), tuple(experts))


def _place_experts(
    model: PreTrainedModel, checkpoint: Checkpoint, names: ModelNames, described: Mapping[str, Exl3Linear]
) -> tuple[list[PlacedExperts], set[str]]:
    """The layers of experts, and the names of all linears of experts, also of layers that the model lacks."""
    config = parse_model_config(checkpoint.config, file=str(checkpoint.path / CONFIG_NAME))
    text = model.config.get_text_config()
    placed: list[PlacedExperts] = []
    taken: set[str] = set()
    for key, experts in find_layers(checkpoint).items():
        taken |= experts.keys()
        found = names.find_experts(key.prefix, next(iter(experts)))
        if found is None:
            continue
        if text.model_type not in ARCHITECTURES:
            raise MoeUnsupportedError(
                f"experts of model type {text.model_type!r} are not supported; supported: {', '.join(ARCHITECTURES)}"
            )
        path, module = found
        layer = build_layer(checkpoint.path, key, experts, {name: described[name] for name in experts}, config)
        _check_experts(path, module, layer, text)
        placed.append(PlacedExperts(path, layer, _top_k(text)))
    return placed, taken


def _check_experts(path: str, module: nn.Module, layer: Exl3Layer, config: Any) -> None:
    geometry = layer_geometry(layer)
    if _top_k(config) > geometry.num_experts:
        raise MoeValueError(f"{path}: the model takes {_top_k(config)} experts per token, of {geometry.num_experts}")
    pairs = {
        "experts": (geometry.num_experts, getattr(module, "num_experts", geometry.num_experts)),
        "hidden channels": (geometry.hidden_size, config.hidden_size),
    }
    for what, (stored, wanted) in pairs.items():
        if stored != wanted:
            raise MoeValueError(f"{path}: the checkpoint has {stored} {what}, the model {wanted}")


def _top_k(config: Any) -> int:
    for key in _TOP_K_KEYS:
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise MoeValueError(f"the model's configuration names no experts per token; keys: {', '.join(_TOP_K_KEYS)}")


def _place_linears(names: ModelNames, described: Mapping[str, Exl3Linear]) -> list[PlacedLinear]:
    placed: dict[str, PlacedLinear] = {}
    for name, linear in described.items():
        found = names.find(name)
        if found is None:
            continue
        path, module = found
        if not isinstance(module, nn.Linear):
            raise MoeUnsupportedError(f"{path} is a {type(module).__name__}, quantised as {name}; only Linear may be")
        if path in placed:
            raise MoeUnsupportedError(f"{path} joins {placed[path].linear.name} and {name}; one linear is supported")
        widths = (module.in_features, module.out_features)
        for side, wide, stored in zip(("input", "output"), widths, (linear.k, linear.n), strict=True):
            if wide > stored or stored - wide >= 128:
                raise MoeValueError(f"{name} has {stored} {side} channels in the checkpoint, {wide} in the model")
        placed[path] = PlacedLinear(path, linear, *widths)
    return list(placed.values())


def _forget_ties(model: PreTrainedModel) -> None:
    """Weights that are quantised are tied to no other: a quantised head has codes of its own."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    ties = model.all_tied_weights_keys
    for name in [name for name, other in ties.items() if name not in parameters or other not in parameters]:
        del ties[name]


def _check_no_experts_are_left(model: PreTrainedModel) -> None:
    left = [name for name, module in model.named_modules() if type(module).__name__.endswith("Experts")]
    if left:
        raise MoeValueError(f"the checkpoint has no experts for {left[0]} ({len(left)} such modules)")
