"""Does the backward fit, and which tiles it takes: shared memory and registers of a (BackwardSpec, BackwardTiles), in plain Python."""

from __future__ import annotations

from dataclasses import replace

from ...mask import MaskKind
from . import roles
from .backward_tiles import (
    CONSUMERS,
    KEYS_PER_CONSUMER,
    PIECE_STAGES,
    PIECE_WORDS,
    STATISTICS_TAIL,
    ZERO_WORDS,
    BackwardSpec,
    BackwardTiles,
    DqPath,
    Order,
    Split,
    clears_ahead,
    converts_behind,
)
from .budget import ALIGNMENT_BYTES, BARRIER_BYTES, SMEM_PER_BLOCK_BYTES, WORK_STAGES

WIDTHS = (32, 64, 96, 128, 192, 256)
"""Tile widths of value_dim, and, but for 96 and 192, of head_dim."""
NARROW, WIDE, WIDEST = 64, 128, 256
WORK_WORDS = 4
"""int32 words of the box that carries a tile's number to the consumers, of which one is used."""
NARROW_TURNS_FROM, WIDE_TURNS_FROM = 8, 32
"""Blocks of queries, over all heads, in the mean walk of a tile; of width 128 in the longest: the first and the last turns, in which one
consumer waits, must pay."""
WIDE_PERSISTENT_FROM = 8
"""Blocks in the mean walk under a causal mask, where tiles are of unlike lengths."""
BLOCK_STAGES = 2
"""Split.KEYS: of Q, dO and dS, which go together: one place in the ring for all three, and 2, so that its number is dS's parity too."""
BESIDE_ACCUMULATORS = 12
"""Registers that a loop needs besides matmul operands and results."""


def widths_of(head_dim: int, value_dim: int, softcap: bool = False) -> tuple[int, int]:
    """Tile widths of Q, K and of V. A narrow pair takes 128 queries at a time; a wide one 64, whose dQᵀ wants 128 columns of K; the widest
    shares a tile by roles, and halves of dQ want 256. A softcap wants the registers of 64 queries."""
    qk, v = (next(w for w in WIDTHS if w >= dim) for dim in (head_dim, value_dim))
    if max(qk, v) > WIDE:
        return WIDEST, v
    return (qk, v) if max(qk, v) <= NARROW and not softcap else (WIDE, v)


def choose(spec: BackwardSpec, q_len: int) -> BackwardTiles:
    """Tiles for up to q_len queries a sequence, of a problem that no tuned table covers. The reasons are measurements, in
    docs/performance.md."""
    path = DqPath.ORDERED if spec.deterministic else DqPath.REGISTERS
    if spec.qk_width == WIDEST:
        stages = 1 if spec.deterministic else 2  # the float32 dQ takes 64 KB
        return BackwardTiles(q=64, kv=KEYS_PER_CONSUMER, split=Split.ROLES, dq_path=path, q_stages=stages, do_stages=stages)
    tiles = BackwardTiles(q=64 if spec.qk_width == WIDE else 128, dq_path=path)
    if spec.deterministic or spec.softcap or spec.mask_kind not in (MaskKind.FULL, MaskKind.CAUSAL):
        return tiles
    causal, longest = spec.mask_kind is MaskKind.CAUSAL, q_len * spec.heads_per_kv // tiles.q
    mean = longest // 2 if causal else longest
    if spec.qk_width < WIDE:  # turns leave no register for what a persistent block must remember
        in_turn, persistent = mean >= NARROW_TURNS_FROM, False
    else:
        in_turn = longest >= WIDE_TURNS_FROM
        persistent = not spec.is_ragged and (in_turn or (causal and mean >= WIDE_PERSISTENT_FROM))
    return replace(tiles, order=Order.IN_TURN if in_turn else Order.TOGETHER, kv_stages=2 if persistent else 1)


def tile_bytes(spec: BackwardSpec, tiles: BackwardTiles) -> dict[str, int]:
    """Bytes of each buffer in shared memory, in the order of their addresses."""
    size = spec.dtype.bytes
    return {
        "Q": size * tiles.q * spec.qk_width * tiles.q_stages,
        "dO": size * tiles.q * spec.v_width * tiles.do_stages,
        "K": size * tiles.kv * spec.qk_width * tiles.kv_stages,
        "V": size * tiles.kv * spec.v_width * tiles.kv_stages,
        "dS": size * tiles.q * tiles.kv * tiles.ds_stages,
        "dQ": 4 * tiles.q * spec.qk_width if tiles.has_sender else 0,
        "P": spec.dtype.bytes * tiles.q * tiles.kv if tiles.split is Split.ROLES else 0,
        "L": 4 * (tiles.q + STATISTICS_TAIL) * tiles.q_stages,
        "D": 4 * tiles.q * tiles.do_stages,
        "zeros": 4 * ZERO_WORDS if clears_ahead(spec, tiles) else 0,
        "pieces": 4 * PIECE_WORDS * PIECE_STAGES * tiles.spare_warps if converts_behind(spec, tiles) else 0,
    }


def smem_bytes(spec: BackwardSpec, tiles: BackwardTiles) -> int:
    """All shared memory of a block: the tiles, a full and an empty barrier per stage."""
    total = 0
    for name, n in tile_bytes(spec, tiles).items():
        step = 128 if name in ("dQ", "P", "L", "D", "zeros", "pieces") else ALIGNMENT_BYTES
        total = -(-total // step) * step + n
    barriers = 2 * (tiles.q_stages + tiles.do_stages + 2 * tiles.kv_stages)
    if tiles.persistent:
        barriers += 2 * WORK_STAGES
        total += 4 * WORK_WORDS * WORK_STAGES
    if converts_behind(spec, tiles):
        barriers += PIECE_STAGES * tiles.spare_warps
    return total + BARRIER_BYTES * barriers


def accumulator_registers(spec: BackwardSpec, tiles: BackwardTiles) -> int:
    """Registers of a consumer thread that hold matmul operands and results: dK, dV or one of them, and the larger of (S, dP, P) and (P,
    dS, dQ); in turn of (P, dP, dQ) and (dS, S, P)."""
    scores, dq = tiles.q // 2, tiles.q * spec.qk_width // (2 * roles.WARPGROUP_THREADS)
    if tiles.split is Split.ROLES:
        return max(spec.qk_width, spec.v_width) // 2 + max(2 * scores + scores // 2, scores // 2 + dq)
    if tiles.order is Order.IN_TURN:
        return (spec.qk_width + spec.v_width) // 2 + scores + scores // 2 + max(dq, scores // 2)
    return (spec.qk_width + spec.v_width) // 2 + max(2 * scores + scores // 2, scores + dq)


def problems(spec: BackwardSpec, tiles: BackwardTiles) -> list[str]:
    """Why these tiles cannot run, one sentence each; empty when they can."""
    found = []
    if spec.qk_width not in (32, NARROW, WIDE, WIDEST) or spec.v_width not in WIDTHS:
        found.append(f"tile widths must be among {WIDTHS} (of queries not 96 and 192), got {spec.qk_width} and {spec.v_width}")
    by_roles = tiles.split is Split.ROLES
    if tiles.q not in (KEYS_PER_CONSUMER,) if by_roles else tiles.q not in (KEYS_PER_CONSUMER, CONSUMERS * KEYS_PER_CONSUMER):
        found.append(f"q must be 64, or 128 with keys shared, got {tiles.q}")
    keys = KEYS_PER_CONSUMER if by_roles else CONSUMERS * KEYS_PER_CONSUMER
    if tiles.kv != keys:
        found.append(f"kv must be {keys}, got {tiles.kv}")
    if tiles.dq_transposed and spec.qk_width != WIDE:
        found.append(f"64 queries at a time need width {WIDE} of queries and keys, got {spec.qk_width}")
    stages = tiles.q_stages, tiles.do_stages, tiles.ds_stages
    if by_roles and (min(stages) < 1 or tiles.ds_stages != 2):
        found.append(f"rings of Q and dO need a stage, that of dS two, got {stages}")
    if not by_roles and stages != (BLOCK_STAGES,) * 3:
        found.append(f"consumers that share keys have {BLOCK_STAGES} stages of Q, dO and dS, got {stages}")
    if tiles.persistent and (spec.is_ragged or by_roles or tiles.has_sender):
        found.append("persistent blocks need sequences of equal lengths, consumers that share keys, and dQ from registers")
    if tiles.order is Order.IN_TURN and (by_roles or tiles.has_sender or spec.softcap):
        found.append("turns need consumers that share keys, dQ from registers, and no softcap: dS is made from the 16-bit P")
    if spec.deterministic and tiles.dq_path is not DqPath.ORDERED:
        found.append(f"a deterministic backward needs the ordered path of dQ, got {tiles.dq_path.value}")
    if found:
        return found
    need = accumulator_registers(spec, tiles) + BESIDE_ACCUMULATORS
    if need > roles.consumer_registers(tiles):
        found.append(f"a consumer thread needs about {need} registers, {roles.consumer_registers(tiles)} are there")
    smem = smem_bytes(spec, tiles)
    if smem > SMEM_PER_BLOCK_BYTES:
        found.append(f"shared memory: {smem} bytes of {SMEM_PER_BLOCK_BYTES}")
    return found
