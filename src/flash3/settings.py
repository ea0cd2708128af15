"""Every environment variable of flash3, in one table, and the settings they give their first value.

flash3.settings.check_values = True            # for the process
with flash3.settings.override(backend="cpu"):  # for this thread (and its tasks) only
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Variable:
    name: str
    field: str
    default: str
    meaning: str


VARIABLES = (
    Variable("FLASH3_BACKEND", "backend", "", "use this backend only (hopper, triton, cpu); empty: the first that fits"),
    Variable("FLASH3_CHECK", "check_values", "0", "1: also validate values that live on a GPU (lengths, page tables); this synchronizes"),
    Variable("FLASH3_CACHE_DIR", "cache_dir", "", "where compiled kernels are kept; empty: the user's cache folder"),
    Variable("FLASH3_TUNED", "tuned", "", "a table of tuned tiles to take before the shipped one; off: no table"),
)

_FALSE = {"", "0", "false", "no", "off"}
_TRUE = {"1", "true", "yes", "on"}


def _flag(variable: Variable, text: str) -> bool:
    word = text.strip().lower()
    if word not in _FALSE | _TRUE:
        raise ValueError(f"{variable.name} must be 0 or 1, got {text!r}")
    return word in _TRUE


def _read(variable: Variable) -> Any:
    text = os.environ.get(variable.name, variable.default)
    return _flag(variable, text) if variable.field == "check_values" else text.strip() or None


_values: dict[str, Any] = {v.field: _read(v) for v in VARIABLES}
_overrides: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar("flash3_settings", default=None)


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Change settings inside a `with` block, for this thread or task alone.

    Raises:
        AttributeError: no such setting.
    """
    for field in values:
        _known(field)
    token = _overrides.set({**(_overrides.get() or {}), **values})
    try:
        yield
    finally:
        _overrides.reset(token)


def current(field: str) -> Any:
    """The value of a setting, as the attribute gives it, for where microseconds count."""
    overrides = _overrides.get()
    return _values[field] if overrides is None else overrides.get(field, _values[field])


def deciding() -> tuple[Any, ...]:
    """All settings that change what a call does, at once, for where microseconds count: backend, tuned, check_values."""
    overrides = _overrides.get()
    values = _values if overrides is None else {**_values, **overrides}
    return values["backend"], values["tuned"], values["check_values"]


def _known(field: str) -> str:
    if field not in _values:
        raise AttributeError(f"no setting {field!r}; known: {', '.join(_values)}")
    return field


class _Settings(types.ModuleType):
    """This module's own class, so that settings are attributes of `flash3.settings` that can be assigned and overridden."""

    def __getattr__(self, field: str) -> Any:
        return current(_known(field))

    def __setattr__(self, field: str, value: Any) -> None:
        if field.startswith("__"):
            super().__setattr__(field, value)
        else:
            _values[_known(field)] = value


backend: str | None
check_values: bool
cache_dir: str | None
tuned: str | None

settings = sys.modules[__name__]
settings.__class__ = _Settings
