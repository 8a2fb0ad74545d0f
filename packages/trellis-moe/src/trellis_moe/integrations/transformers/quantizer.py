"""Owns the quantizer that transformers calls while it loads an EXL3 checkpoint.  It must not know architectures.

The order is transformers': the model's skeleton on the meta device, this quantizer's placeholders, the tensors that are
not quantised, and at the end the codes, which this quantizer streams module by module inside the staging bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trellis_format.checkpoint import Checkpoint, open_checkpoint
from trellis_format.exl3.declared import EXL3_METHOD
from trellis_moe.errors import MoeUnsupportedError, MoeValueError
from trellis_moe.integrations.transformers.fill import fill_modules
from trellis_moe.integrations.transformers.options import TrellisOptions, current_options
from trellis_moe.integrations.transformers.skeleton import Skeleton, place_modules
from trellis_moe.specs import io_dtype_name

__all__ = ["METHOD", "Exl3Config", "Exl3Quantizer"]

METHOD = EXL3_METHOD
"""`quant_method` of the checkpoints that this quantizer loads."""
_PLANNED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


@register_quantization_config(METHOD)
class Exl3Config(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is an extra, whose types are not read
    """The object `quantization_config` of an EXL3 checkpoint, as its file states it."""

    def __init__(self, **stated: Any) -> None:
        self.__dict__.update(stated)
        self.quant_method = METHOD


@register_quantizer(METHOD)
class Exl3Quantizer(HfQuantizer):  # type: ignore[misc]  # transformers is an extra, whose types are not read
    """Loads EXL3 checkpoints for inference; it neither quantises nor saves."""

    requires_calibration = True  # transformers' word for a method that only loads what is quantised already

    def __init__(self, quantization_config: Exl3Config, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self._options: TrellisOptions = current_options()
        self._checkpoint: Checkpoint | None = None
        self._skeleton: Skeleton | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}

    def validate_environment(self, *_given: Any, device_map: Any = None, **_keywords: Any) -> None:
        if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
            places = ", ".join(sorted({str(device) for device in device_map.values()}))
            raise MoeUnsupportedError(
                f"device_map names several devices: {places}; a process loads a model onto one, and ranks share the "
                "experts by TrellisOptions(group=...)"
            )

    def update_device_map(self, device_map: Any) -> Any:
        if device_map in _PLANNED_MAPS:
            place = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
            return {"": place}
        return device_map

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        io_dtype_name(dtype)
        return dtype

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **_keywords: Any
    ) -> None:
        if not checkpoint_files:
            raise MoeValueError("a state dict was given; EXL3 codes are read from the checkpoint's files")
        self._checkpoint = open_checkpoint(Path(checkpoint_files[0]).parent)
        try:
            self._skeleton = place_modules(model, self._checkpoint)
        except BaseException:
            self._checkpoint.close()
            raise
        self._shapes = _shapes(model)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | self._skeleton.ignored_patterns()

    def _process_model_after_weight_loading(self, model: Any, **_keywords: Any) -> Any:
        assert self._checkpoint is not None and self._skeleton is not None  # noqa: PT018  # set together, before
        with self._checkpoint:
            self._check_shapes(model)
            fill_modules(model, self._skeleton, self._options)
        return model

    def _check_shapes(self, model: Any) -> None:
        """Refuse tensors of other shapes than the model's, which some releases of transformers load all the same."""
        for name, shape in _shapes(model).items():
            wanted = self._shapes.get(name, shape)
            if shape != wanted:
                raise MoeValueError(f"{name} has shape {list(shape)} in the checkpoint, {list(wanted)} in the model")

    def is_serializable(self, *_given: Any, **_keywords: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
