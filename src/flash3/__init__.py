"""flash3: FlashAttention-3, complete, in Python."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import flash_attn_interface, settings
    from .flash_attn_interface import install
    from .frameworks.torch import KVCache, Rotary, attention, attention_kvcache, attention_varlen, explain, merge
    from .mask import Mask
    from .problem import Problem

__version__ = "0.1.0"

_HOMES = {
    "Mask": "mask",
    "Problem": "problem",
    "install": "flash_attn_interface",
    **dict.fromkeys(("KVCache", "Rotary", "attention", "attention_kvcache", "attention_varlen", "explain", "merge"), "frameworks.torch"),
}
"""Public name -> the room it lives in. `import flash3` itself loads no framework."""

__all__ = [
    "KVCache",
    "Mask",
    "Problem",
    "Rotary",
    "attention",
    "attention_kvcache",
    "attention_varlen",
    "explain",
    "flash_attn_interface",
    "install",
    "merge",
    "settings",
]


def __getattr__(name: str) -> Any:
    if name in ("flash_attn_interface", "settings"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
