"""Typed access to the metadata of a model."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numpy as np

from gguf_pp.errors import ConfigError, FormatError

S = TypeVar("S")
T = TypeVar("T")
_REQUIRED: Final[Any] = object()
_NUMPY_KINDS: Final = {"b": "bool", "i": "int", "u": "int", "f": "float"}


class Metadata(Mapping[str, object]):
    """Keys and values of a GGUF file.

    Values are int, float, bool, str, read-only numpy arrays (of numbers) and lists (of strings or
    lists). A getter without a default raises FormatError if the key is missing; with or without,
    it raises FormatError if the value has another type than the wanted one.
    """

    def __init__(self, values: Mapping[str, object], path: Path) -> None:
        self._values = dict(values)
        self._path = path

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def int_of(self, key: str, default: T = _REQUIRED) -> int | T:
        """Return an integer."""
        return self._scalar(key, int, default)

    def float_of(self, key: str, default: T = _REQUIRED) -> float | T:
        """Return a finite float."""
        value = self._scalar(key, float, default)
        if isinstance(value, float) and key in self._values and not math.isfinite(value):
            raise FormatError(f"{self._path}: metadata key {key!r} is {value}")
        return value

    def bool_of(self, key: str, default: T = _REQUIRED) -> bool | T:
        """Return a bool."""
        return self._scalar(key, bool, default)

    def str_of(self, key: str, default: T = _REQUIRED) -> str | T:
        """Return a string."""
        return self._scalar(key, str, default)

    def list_of(self, key: str, kind: type[S], default: T = _REQUIRED) -> list[S] | T:
        """Return an array as a list of `kind`: int, float, bool or str."""
        if key not in self._values:
            self._check_optional(key, default)
            return default
        value = self._values[key]
        name, found = kind.__name__, _name(value)
        if found not in (f"list of {name}", "list of nothing"):
            raise self._mistyped(key, f"list of {name}", found)
        items = value.tolist() if isinstance(value, np.ndarray) else value
        return list(cast(list[S], items))

    def _check_optional(self, key: str, default: object) -> None:
        if default is _REQUIRED:
            raise FormatError(
                f"{self._path}: metadata key {key!r} is missing",
                hint=f"set it with --override-kv {key}=TYPE:VALUE if you know it",
            )

    def _scalar(self, key: str, kind: type[S], default: T) -> S | T:
        if key not in self._values:
            self._check_optional(key, default)
            return default
        value = self._values[key]
        # Not isinstance: a bool is an int to Python, but not in a file.
        if type(value) is not kind:
            raise self._mistyped(key, kind.__name__, _name(value))
        return value

    def _mistyped(self, key: str, wanted: str, found: str) -> FormatError:
        return FormatError(f"{self._path}: metadata key {key!r} should be {wanted}, but is {found}")


def _name(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"list of {_NUMPY_KINDS[value.dtype.kind]}"
    if isinstance(value, list):
        return f"list of {_name(value[0]) if value else 'nothing'}"
    return type(value).__name__


def overridden(values: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Return `values` with each override, KEY=TYPE:VALUE, applied.

    TYPE is int, float, bool or str, as in llama.cpp's --override-kv. Raises ConfigError for one
    that is malformed, given twice, or of another type than the value in the file.
    """
    new: dict[str, object] = {}
    for text in overrides:
        key, value = _parse_override(text)
        if key in new:
            raise ConfigError(f"--override-kv sets {key!r} twice")
        old = values.get(key, value)
        if type(old) is not type(value):
            raise ConfigError(
                f"--override-kv {text!r} is {_name(value)}, but {key!r} is {_name(old)} in the file"
            )
        new[key] = value
    return {**values, **new}


def _parse_override(text: str) -> tuple[str, object]:
    key, equals, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    if not (key and equals and colon):
        raise _malformed(text, "not KEY=TYPE:VALUE")
    if kind == "str":
        return key, value
    if kind == "bool":
        if value not in ("true", "false"):
            raise _malformed(text, f"{value!r} is neither true nor false")
        return key, value == "true"
    if kind == "int":
        if not re.fullmatch(r"[+-]?[0-9]{1,19}", value) or not -(1 << 63) <= int(value) < 1 << 63:
            raise _malformed(text, f"{value!r} is not a 64-bit integer")
        return key, int(value)
    if kind == "float":
        return key, _finite(text, value)
    raise _malformed(text, f"{kind!r} is none of int, float, bool and str")


def _finite(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError as exc:
        raise _malformed(text, f"{value!r} is not a number") from exc
    if not math.isfinite(number):
        raise _malformed(text, f"{value!r} is not a finite number")
    return number


def _malformed(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"--override-kv {text!r}: {why}",
        hint="for example --override-kv llama.context_length=int:4096",
    )
