"""The named backward kernels that tests compile, gpu_check checks and backward.py times: every feature is among them."""

from __future__ import annotations

from dataclasses import replace

from flash3.backends.hopper import backward_budget
from flash3.backends.hopper.backward_tiles import BackwardSpec, BackwardTiles, DqPath
from flash3.mask import MaskKind
from flash3.problem import DType

from .configurations import CAUSAL, CHUNK, FULL, PACKED, PACKED_USED, PADDED, PADDED_LEFT, WINDOW

BackwardConfiguration = tuple[BackwardSpec, BackwardTiles]
BACKWARD: dict[str, BackwardConfiguration] = {}
LONG, MIDDLE, SHORT = 8192, 1024, 512
"""Lengths whose tiles are listed."""


def _add(name: str, spec: BackwardSpec, tiles: BackwardTiles | None = None) -> None:
    if name in BACKWARD:
        raise ValueError(f"two configurations are called {name}")
    BACKWARD[name] = (spec, tiles or backward_budget.choose(spec, LONG))


def _add_other_blocks(name: str, spec: BackwardSpec, tiles: BackwardTiles) -> None:
    """The same with blocks that are persistent where these are not."""
    other = replace(tiles, kv_stages=1 if tiles.persistent else 2)
    _add(f"{name}_{'persistent' if other.persistent else 'single'}", spec, other)


def _spec(width: int, mask_kind: MaskKind, value: int | None = None, **fields: object) -> BackwardSpec:
    base = BackwardSpec(qk_width=width, v_width=value or width, mask_kind=mask_kind)
    return replace(base, **fields)  # type: ignore[arg-type]


def _dense() -> None:
    for mask in (FULL, CAUSAL, WINDOW, CHUNK):
        for width in (64, 128, 256):
            _add(f"backward_{width}_{mask.value}", _spec(width, mask))
    for width in (64, 128):
        spec, tiles = BACKWARD[f"backward_{width}_full"]
        _add(f"backward_{width}_full_shared", spec, BackwardTiles(q=tiles.q, dq_path=DqPath.SHARED))
        for mask in (FULL, CAUSAL):
            spec, tiles = BACKWARD[f"backward_{width}_{mask.value}"]
            short = backward_budget.choose(spec, SHORT)
            _add(f"backward_{width}_{mask.value}_short", spec, short)
            if width == 64:
                _add_other_blocks(f"backward_{width}_{mask.value}_short", spec, short)
            _add_other_blocks(f"backward_{width}_{mask.value}", spec, tiles)
    for mask in (FULL, CAUSAL):
        spec, tiles = BACKWARD[f"backward_256_{mask.value}"]
        _add(f"backward_256_{mask.value}_short", spec, backward_budget.choose(spec, SHORT))

    spec, tiles = BACKWARD["backward_256_causal"]
    _add("backward_256_causal_alone", spec, replace(tiles, cluster=1, ds_stages=2))
    spec = _spec(128, CAUSAL)
    _add("backward_128_causal_middle", spec, backward_budget.choose(spec, MIDDLE))


def _features() -> None:
    half = {"dtype": DType.FP16, "out_dtype": DType.FP16}
    _add("backward_64_causal_fp16", _spec(64, CAUSAL, **half))
    _add("backward_128_full_fp16", _spec(128, FULL, **half))
    _add("backward_256_causal_fp16", _spec(256, CAUSAL, **half))
    _add("backward_256_128_full", _spec(256, FULL, 128))
    _add("backward_256_192_causal_gqa", _spec(256, CAUSAL, 192, heads_per_kv=2))
    _add("backward_256_causal_softcap", _spec(256, CAUSAL, softcap=True))
    _add("backward_256_full_sink_lse", _spec(256, FULL, sink=True, lse_gradient=True))
    _add("backward_32_causal", _spec(32, CAUSAL))
    _add("backward_32_64_full", _spec(32, FULL, 64))
    _add("backward_128_96_causal", _spec(128, CAUSAL, 96))
    _add("backward_128_64_full", _spec(128, FULL, 64))
    _add("backward_128_causal_gqa", _spec(128, CAUSAL, heads_per_kv=4))
    _add("backward_64_full_gqa", _spec(64, FULL, heads_per_kv=7))
    _add("backward_128_causal_softcap", _spec(128, CAUSAL, softcap=True))
    _add("backward_128_full_softcap", _spec(128, FULL, softcap=True))
    _add("backward_64_window_sink", _spec(64, WINDOW, sink=True, heads_per_kv=8))
    _add("backward_128_full_sink_lse", _spec(128, FULL, sink=True, lse_gradient=True))
    _add("backward_128_causal_lse", _spec(128, CAUSAL, lse_gradient=True))


def _deterministic() -> None:
    for mask in (FULL, CAUSAL):
        for width in (64, 128, 256):
            _add(f"backward_{width}_{mask.value}_deterministic", _spec(width, mask, deterministic=True))
    _add("backward_64_window_deterministic", _spec(64, WINDOW, deterministic=True, heads_per_kv=2))
    _add("backward_128_chunk_deterministic", _spec(128, CHUNK, deterministic=True))
    _add("backward_128_full_deterministic_gqa", _spec(128, FULL, deterministic=True, heads_per_kv=3))
    _add("backward_128_causal_deterministic_packed", _spec(128, CAUSAL, deterministic=True, q_layout=PACKED, k_layout=PACKED))


def _ragged() -> None:
    for width in (64, 128, 256):
        _add(f"backward_{width}_causal_packed", _spec(width, CAUSAL, q_layout=PACKED, k_layout=PACKED))
    _add("backward_128_full_packed_gqa", _spec(128, FULL, q_layout=PACKED, k_layout=PACKED, heads_per_kv=2))
    _add("backward_128_causal_packed_used", _spec(128, CAUSAL, q_layout=PACKED_USED, k_layout=PACKED_USED, lse_gradient=True))
    _add("backward_64_window_padded", _spec(64, WINDOW, q_layout=PADDED, k_layout=PADDED))
    _add("backward_128_causal_left", _spec(128, CAUSAL, k_layout=replace(PADDED_LEFT, batch_index=False), heads_per_kv=4))


_dense()
_features()
_deterministic()
_ragged()
