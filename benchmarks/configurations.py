"""The named forward kernels that tests compile, gpu_check checks and forward.py times: at most 60, covering every feature."""

from __future__ import annotations

from dataclasses import replace

from flash3.backends.hopper import heuristics
from flash3.backends.hopper.tiles import ForwardSpec, Overlap, QuerySource, Tiles, Turns
from flash3.mask import MaskKind

Configuration = tuple[ForwardSpec, Tiles]
CONFIGURATIONS: dict[str, Configuration] = {}
LONG, MIDDLE, SHORT = 16384, 1024, 512
"""Key lengths for which the heuristic is asked."""
ABLATION = ("128_full_turns", "128_full_in_order", "128_full_in_order_free")
"""The paper's ablation: with and without ping-pong, with and without overlap inside a warpgroup. 128_full has neither turns nor loss."""


def _add(name: str, spec: ForwardSpec, tiles: Tiles | None = None) -> None:
    assert name not in CONFIGURATIONS, name
    CONFIGURATIONS[name] = (spec, tiles or heuristics.choose(spec, LONG))


def _dense() -> None:
    for mask in (MaskKind.FULL, MaskKind.CAUSAL):
        for width in (64, 128, 256):
            spec = ForwardSpec(qk_width=width, v_width=width, mask_kind=mask)
            _add(f"{width}_{mask.value}", spec)
        narrow = ForwardSpec(qk_width=64, v_width=64, mask_kind=mask)
        _add(f"64_{mask.value}_short", narrow, heuristics.choose(narrow, SHORT))
        _add(f"64_{mask.value}_middle", narrow, heuristics.choose(narrow, MIDDLE if mask is MaskKind.FULL else 2 * MIDDLE))


def _ablations() -> None:
    spec, tiles = CONFIGURATIONS["128_full"]
    _add("128_full_turns", spec, replace(tiles, turns=Turns.PING_PONG))
    _add("128_full_in_order", spec, replace(tiles, turns=Turns.PING_PONG, overlap=Overlap.IN_ORDER))
    _add("128_full_in_order_free", spec, replace(tiles, overlap=Overlap.IN_ORDER))
    _add("128_full_shared_q", spec, replace(tiles, query_source=QuerySource.SHARED))
    narrow, _ = CONFIGURATIONS["64_causal"]
    _add("64_causal_kv64", narrow, replace(CONFIGURATIONS["64_causal_middle"][1], kv=64))


_dense()
_ablations()


def name_of(spec: ForwardSpec, tiles: Tiles) -> str:
    """The name of a configuration in the list.

    Raises:
        LookupError: it is not there.
    """
    for name, configuration in CONFIGURATIONS.items():
        if configuration == (spec, tiles):
            return name
    raise LookupError(f"not in the list: {spec} {tiles}")
