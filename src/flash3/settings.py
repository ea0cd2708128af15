"""Every environment variable of flash3, in one table, and the settings they give their first value.

flash3.settings.check_values = True            # for the process
with flash3.settings.override(backend="cpu"):  # for this thread (and its tasks) only
"""

from __future__ import annotations

import contextlib
import contextvars
import os
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


class Settings:
    """Read once from the environment, then plain attributes. `override` is local to the current context (thread or task)."""

    backend: str | None
    check_values: bool
    cache_dir: str | None

    def __init__(self) -> None:
        self.__dict__["_values"] = {v.field: _read(v) for v in VARIABLES}
        self.__dict__["_overrides"] = contextvars.ContextVar("flash3_settings", default=None)

    def __getattr__(self, field: str) -> Any:
        if field not in self.__dict__["_values"]:
            raise AttributeError(f"no setting {field!r}; known: {', '.join(self._values)}")
        return (self._overrides.get() or self._values).get(field, self._values[field])

    def __setattr__(self, field: str, value: Any) -> None:
        getattr(self, field)
        self._values[field] = value

    @contextlib.contextmanager
    def override(self, **values: Any) -> Iterator[Settings]:
        """Change settings inside a `with` block, for this thread or task alone."""
        for field in values:
            getattr(self, field)
        token = self._overrides.set({**(self._overrides.get() or {}), **values})
        try:
            yield self
        finally:
            self._overrides.reset(token)


settings = Settings()
