"""Owns the way from a checkpoint's module names to those of the model class.  It must not know what a module does.

Checkpoints keep the names of their architecture's first release; transformers has a table of renamings for each model
class, which is asked here, so that no name is written down twice.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

__all__ = ["ModelNames"]


class ModelNames:
    """The names of a model's modules, by those in checkpoints.

    Args:
        model: the model class's skeleton, before any of its modules is replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        self._converters = [each for each in transforms if isinstance(each, WeightConverter)]
        self._base_prefix = model.base_model_prefix
        self._state = model.state_dict()
        self._modules: dict[str, nn.Module] = dict(model.named_modules())

    def find(self, name: str) -> tuple[str, nn.Module] | None:
        """The module that a checkpoint's linear is loaded into, by its path; None where the model has none.

        Args:
            name: module name in the checkpoint, of a linear or of a list of experts.
        """
        renamed = self._renamed(f"{name}.weight")
        for path in (renamed, name):
            if path in self._modules:
                return path, self._modules[path]
        return None

    def find_experts(self, prefix: str, linear: str) -> tuple[str, nn.Module] | None:
        """The module that a layer's experts are loaded into.

        Args:
            prefix: path of the experts in the checkpoint.
            linear: module name of one linear of one expert, under that path.
        """
        merged = self._renamed(f"{linear}.weight")
        for path in (merged, merged.removesuffix(linear.removeprefix(prefix))):
            if path in self._modules:
                return path, self._modules[path]
        return self.find(prefix)

    def _renamed(self, key: str) -> str:
        """The path of the module that a checkpoint's tensor goes to."""
        renamed, _ = rename_source_key(key, self._renamings, self._converters, self._base_prefix, self._state)
        return str(renamed).rpartition(".")[0]
