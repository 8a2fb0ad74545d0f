"""Owns strict JSON schemas: unknown and missing keys, wrong JSON types and wrong values, each named by its path.

It must not know any particular schema.  A wrong JSON type is a `FormatTypeError`, raised before pydantic validates,
because its own error is a `ValueError`; everything else that is wrong is a `FormatValueError`.
"""

from __future__ import annotations

import os
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from trellis_format.errors import FormatTypeError, FormatValueError

__all__ = ["StrictModel", "emit_json", "is_power_of_two", "parse_model", "refuse_key"]

_NAMES = {int: "an integer", str: "a string", bool: "a boolean", float: "a number"}
_SHOWN = 80  # characters of a wrong value that a message shows
_MAX_REPORTED = 5

Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """An object of a strict schema: immutable, no unknown keys, no coercion.

    Raises:
        FormatTypeError: if a value has another JSON type, such as a boolean for an integer; names its path.
        pydantic.ValidationError: if anything else is wrong; `parse_model` turns it into a `FormatValueError`.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_types(cls, data: Any) -> Any:
        if not isinstance(data, cls):
            _check_object(cls, data, "", null=True)
        return data


def parse_model(model: type[Model], data: Any, *, file: str | os.PathLike[str] | None = None) -> Model:
    """Validate parsed JSON.

    Args:
        model: the schema.
        data: parsed JSON.
        file: named in errors.

    Raises:
        FormatTypeError: if a value has the wrong JSON type; null is no value.
        FormatValueError: if a key is unknown or missing, or a value is wrong; names the path of each.
    """
    try:
        _check_object(model, data, "", null=False)
        return model.model_validate(data)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors()]
        more = f" (and {len(problems) - _MAX_REPORTED} more)" if len(problems) > _MAX_REPORTED else ""
        raise FormatValueError("; ".join(problems[:_MAX_REPORTED]) + more, file=file) from error
    except FormatTypeError as error:
        raise FormatTypeError(error.message, file=file) from error


def emit_json(model: BaseModel) -> dict[str, Any]:
    """The JSON object of a model, with the keys that were given; the inverse of `parse_model`."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)


def refuse_key(key: str, rule: str) -> PydanticCustomError:
    """The error of a validator about one key of its object, so that the message has the key's path."""
    return PydanticCustomError("rule", "{key}: {rule}", {"key": key, "rule": rule})


def is_power_of_two(value: int) -> bool:
    """Whether a number is 1, 2, 4, and so on."""
    return value > 0 and value & (value - 1) == 0


def _problem(detail: ErrorDetails) -> str:
    path = ""
    for part in detail["loc"]:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    context = detail.get("ctx", {})
    if detail["type"] == "rule":
        return f"{_join(path, context['key'])}: {context['rule']}"
    if detail["type"] == "missing":
        return f"{path}: missing key"
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown key"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{path}: {message}, got {str(detail['input'])[:_SHOWN]!r}"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _check_object(model: type[BaseModel], data: Any, path: str, *, null: bool) -> None:
    if isinstance(data, model):
        return
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise _wrong(path, "an object with string keys", data)
    fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
    for key, value in data.items():
        if key in fields:
            _check_value(fields[key], value, _join(path, key), null=null)


def _check_value(kind: Any, value: Any, path: str, *, null: bool) -> None:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        _check_value(arguments[0], value, path, null=null)
    elif origin in (Union, UnionType):  # X | None is the only union of these schemas
        if not (value is None and null):
            _check_value(next(part for part in arguments if part is not NoneType), value, path, null=null)
    elif origin is Literal:
        _check_value(type(arguments[0]), value, path, null=null)
    elif origin is tuple:
        if not isinstance(value, list | tuple):
            raise _wrong(path, "an array", value)
        for index, part in enumerate(value):
            _check_value(arguments[0], part, f"{path}[{index}]", null=null)
    elif origin is dict:
        if not isinstance(value, dict):
            raise _wrong(path, "an object", value)
        for key, part in value.items():
            _check_value(arguments[1], part, _join(path, str(key)), null=null)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        _check_object(kind, value, path, null=null)
    else:
        _check_scalar(kind, value, path)


def _check_scalar(kind: Any, value: Any, path: str) -> None:
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise _wrong(path, _NAMES[kind], value)


def _wrong(path: str, wanted: str, value: Any) -> FormatTypeError:
    return FormatTypeError(f"{path or 'the document'} must be {wanted}, got {type(value).__name__}")
