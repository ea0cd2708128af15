"""The named forward kernels that tests compile, gpu_check checks and forward.py times: at most 60, covering every feature."""

from __future__ import annotations

from dataclasses import replace

from flash3.backends.hopper import heuristics
from flash3.backends.hopper.tiles import ForwardSpec, Overlap, QuerySource, ScaleSign, SequenceLayout, Tiles, Turns
from flash3.mask import MaskKind
from flash3.problem import DType
from flash3.sequences import SequenceKind

Configuration = tuple[ForwardSpec, Tiles]
CONFIGURATIONS: dict[str, Configuration] = {}
LONG, MIDDLE, SHORT = 16384, 1024, 512
"""Key lengths for which the heuristic is asked."""
ABLATION = ("128_full_turns", "128_full_in_order", "128_full_in_order_free")
"""The paper's ablation: with and without ping-pong, with and without overlap inside a warpgroup. 128_full has overlap and no turns."""
FULL, CAUSAL, WINDOW, CHUNK = MaskKind.FULL, MaskKind.CAUSAL, MaskKind.WINDOW, MaskKind.CHUNK
PACKED = SequenceLayout(kind=SequenceKind.PACKED)
PACKED_USED = SequenceLayout(kind=SequenceKind.PACKED, used=True)
PADDED = SequenceLayout(kind=SequenceKind.PADDED)
PADDED_LEFT = SequenceLayout(kind=SequenceKind.PADDED, leftpad=True, batch_index=True)


def _add(name: str, spec: ForwardSpec, tiles: Tiles | None = None) -> None:
    if name in CONFIGURATIONS:
        raise ValueError(f"two configurations are called {name}")
    CONFIGURATIONS[name] = (spec, tiles or heuristics.choose(spec, LONG))


def _spec(width: int, mask_kind: MaskKind, value: int | None = None, **fields: object) -> ForwardSpec:
    base = ForwardSpec(qk_width=width, v_width=value or width, mask_kind=mask_kind)
    return replace(base, **fields)  # type: ignore[arg-type]


def _dense() -> None:
    for mask in (FULL, CAUSAL):
        for width in (64, 128, 256):
            _add(f"{width}_{mask.value}", _spec(width, mask))
    for name, k_len in (("short", SHORT), ("middle", MIDDLE)):
        _add(f"64_full_{name}", _spec(64, FULL), heuristics.choose(_spec(64, FULL), k_len))


def _alternatives() -> None:
    spec, tiles = CONFIGURATIONS["128_full"]
    _add("128_full_turns", spec, replace(tiles, turns=Turns.PING_PONG))
    _add("128_full_in_order", spec, replace(tiles, turns=Turns.PING_PONG, overlap=Overlap.IN_ORDER))
    _add("128_full_in_order_free", spec, replace(tiles, overlap=Overlap.IN_ORDER))
    _add("128_full_shared_q", spec, replace(tiles, query_source=QuerySource.SHARED))


def _masks() -> None:
    for mask in (WINDOW, CHUNK):
        for width in (64, 128, 256):
            _add(f"{width}_{mask.value}", _spec(width, mask))
    spec, tiles = CONFIGURATIONS["128_window"]
    _add("128_window_turns", spec, replace(tiles, turns=Turns.PING_PONG))


def _features() -> None:
    half = {"dtype": DType.FP16, "out_dtype": DType.FP16}
    _add("64_causal_fp16", _spec(64, CAUSAL, **half))
    _add("128_full_fp16", _spec(128, FULL, **half))
    _add("256_full_fp16", _spec(256, FULL, **half))
    for width in (64, 128, 256):
        _add(f"{width}_full_partial", _spec(width, FULL, out_dtype=DType.FP32))
    _add("128_causal_partial", _spec(128, CAUSAL, out_dtype=DType.FP32))
    _add("128_causal_gqa", _spec(128, CAUSAL, heads_per_kv=4))
    _add("64_full_gqa", _spec(64, FULL, heads_per_kv=7))
    _add("128_causal_softcap", _spec(128, CAUSAL, softcap=True))
    _add("64_window_sink", _spec(64, WINDOW, sink=True, heads_per_kv=8))
    _add("128_full_sink", _spec(128, FULL, sink=True))
    _add("128_full_negative", _spec(128, FULL, scale_sign=ScaleSign.NEGATIVE))
    _add("128_causal_zero", _spec(128, CAUSAL, scale_sign=ScaleSign.ZERO))
    _add("128_causal_no_lse", _spec(128, CAUSAL, lse=False))
    for width in (32, 96, 192):
        _add(f"{width}_causal", _spec(width, CAUSAL))
    _add("192_128_causal", _spec(192, CAUSAL, 128))
    _add("128_64_full", _spec(128, FULL, 64))
    _add("64_256_full", _spec(64, FULL, 256))


def _ragged() -> None:
    for width in (64, 128, 256):
        _add(f"{width}_causal_packed", _spec(width, CAUSAL, q_layout=PACKED, k_layout=PACKED))
    _add("128_full_packed", _spec(128, FULL, q_layout=PACKED, k_layout=PACKED))
    _add("128_window_packed_gqa", _spec(128, WINDOW, q_layout=PACKED, k_layout=PACKED, heads_per_kv=2))
    _add("128_causal_packed_used", _spec(128, CAUSAL, q_layout=PACKED_USED, k_layout=PACKED_USED))
    _add("128_causal_padded", _spec(128, CAUSAL, q_layout=PADDED, k_layout=PADDED))
    _add("128_causal_cache", _spec(128, CAUSAL, k_layout=PADDED, heads_per_kv=4))
    _add("64_full_cache_left", _spec(64, FULL, k_layout=PADDED_LEFT), heuristics.choose(_spec(64, FULL), SHORT))
    _add("128_chunk_packed_partial", _spec(128, CHUNK, q_layout=PACKED, k_layout=PADDED_LEFT, out_dtype=DType.FP32))


def _shared() -> None:
    """Query heads that share a tile: what few queries take."""
    spec, tiles = CONFIGURATIONS["128_causal_gqa"]
    _add("128_causal_shared", spec, replace(tiles, heads=4))
    spec, tiles = CONFIGURATIONS["64_window_sink"]
    packed = replace(spec, q_layout=PACKED, k_layout=PACKED)
    _add("64_window_packed_shared", packed, replace(heuristics.choose(packed, SHORT), heads=8))
    left = SequenceLayout(kind=SequenceKind.PADDED, leftpad=True)
    padded = _spec(128, CAUSAL, q_layout=left, k_layout=PADDED_LEFT, heads_per_kv=48, sink=True)
    _add("128_causal_padded_shared", padded, replace(heuristics.choose(padded, LONG), heads=16))


_dense()
_alternatives()
_masks()
_features()
_ragged()
_shared()


def name_of(spec: ForwardSpec, tiles: Tiles) -> str:
    """The name of a configuration in the list.

    Raises:
        LookupError: it is not there.
    """
    for name, configuration in CONFIGURATIONS.items():
        if configuration == (spec, tiles):
            return name
    raise LookupError(f"not in the list: {spec} {tiles}")
