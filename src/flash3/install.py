"""Making `import flash_attn_interface` find flash3."""

from __future__ import annotations

import importlib
import sys

NAME = "flash_attn_interface"


def install() -> None:
    """Programs written for FlashAttention-3 then run on flash3 unchanged. Call it before they import `flash_attn_interface`.

    Raises:
        RuntimeError: another `flash_attn_interface` is already imported; its users hold its functions.
    """
    ours = importlib.import_module("flash3.flash_attn_interface")
    present = sys.modules.get(NAME)
    if present is not None and present is not ours:
        raise RuntimeError(f"{NAME} is already imported from {getattr(present, '__file__', 'elsewhere')}: call flash3.install() earlier")
    sys.modules[NAME] = ours
