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
REGISTERS_PER_BLOCK = 1 << 16
WORK_WORDS = 4
"""int32 words of the box that carries a tile's number to the consumers, of which one is used."""
NARROW_TURNS_FROM, WIDE_TURNS_FROM = 8, 32
"""Blocks of queries, over all heads, in the mean walk of a tile; of width 128 in the longest: the first and the last turns, in which one
consumer waits, must pay."""
WIDE_PERSISTENT_FROM = 8
"""mean_walk under a causal mask, where tiles are of unlike lengths."""
ORDERED_BELOW = 16
"""mean_walk, for dQ in order where nobody asks for it: the first tile stores, so that nothing is cleared before."""
BLOCK_STAGES = 2
"""Split.KEYS: of Q, dO and dS, which go together: one place in the ring for all three, and 2, so that its number is dS's parity too."""
BESIDE_ACCUMULATORS = 12
"""Registers that a loop needs besides matmul operands and results."""
ROLE_REGISTERS = (200, 192, 96)
"""Split.ROLES: of a thread of the consumer of scores, of gradients, of dQ."""


def consumer_registers(tiles: BackwardTiles) -> tuple[int, ...]:
    """Registers of a thread of each consumer."""
    return ROLE_REGISTERS if tiles.split is Split.ROLES else (roles.consumer_registers(tiles),) * tiles.consumers


def entry_registers(tiles: BackwardTiles) -> int:
    """Registers of every thread when a block begins."""
    return REGISTERS_PER_BLOCK // tiles.threads // 8 * 8


def producer_registers(tiles: BackwardTiles) -> int:
    return 24


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
        tiles = BackwardTiles(q=64, kv=KEYS_PER_CONSUMER, split=Split.ROLES, dq_path=path, cluster=2, ds_stages=1)
        short = is_plain(spec) and not spec.is_ragged and mean_walk(spec, tiles, q_len) < ORDERED_BELOW
        return replace(tiles, dq_path=DqPath.ORDERED) if short else tiles
    tiles = BackwardTiles(q=64 if spec.qk_width == WIDE else 128, dq_path=path)
    if spec.deterministic or spec.softcap or not is_plain(spec):
        return tiles
    mean, longest = mean_walk(spec, tiles, q_len), q_len * spec.heads_per_kv // tiles.q
    if spec.qk_width < WIDE:  # turns leave no register for what a persistent block must remember
        in_turn, persistent = mean >= NARROW_TURNS_FROM, False
    else:
        in_turn = longest >= WIDE_TURNS_FROM
        persistent = not spec.is_ragged and (in_turn or (spec.mask_kind is MaskKind.CAUSAL and mean >= WIDE_PERSISTENT_FROM))
    return replace(tiles, order=Order.IN_TURN if in_turn else Order.TOGETHER, kv_stages=2 if persistent else 1)


def is_plain(spec: BackwardSpec) -> bool:
    """Whether the mask says how long walks are."""
    return spec.mask_kind in (MaskKind.FULL, MaskKind.CAUSAL)


def mean_walk(spec: BackwardSpec, tiles: BackwardTiles, q_len: int) -> int:
    """Blocks of queries in the mean walk of a tile, over all heads."""
    return q_len * spec.heads_per_kv // tiles.q // (2 if spec.mask_kind is MaskKind.CAUSAL else 1)


def tile_bytes(spec: BackwardSpec, tiles: BackwardTiles) -> dict[str, int]:
    """Bytes of each buffer in shared memory, in the order of their addresses."""
    size = spec.dtype.bytes
    return {
        "Q": size * tiles.q * spec.qk_width * tiles.q_stages,
        "dO": size * tiles.q * spec.v_width * tiles.do_stages,
        "K": size * tiles.kv * spec.qk_width * tiles.kv_stages,
        "V": size * tiles.kv * spec.v_width * tiles.kv_stages,
        "half of K": size * tiles.kv * spec.qk_width // 2 if tiles.cluster > 1 else 0,
        "dS": size * tiles.q * tiles.kv * tiles.ds_stages * tiles.cluster,
        "dQ": 4 * tiles.q * spec.qk_width if tiles.has_sender else 0,
        "L": 4 * (tiles.q + STATISTICS_TAIL) * tiles.q_stages,
        "D": 4 * tiles.q * tiles.do_stages,
        "zeros": 4 * ZERO_WORDS if clears_ahead(spec, tiles) else 0,
        "pieces": 4 * PIECE_WORDS * PIECE_STAGES * tiles.spare_warps if converts_behind(spec, tiles) else 0,
    }


def smem_bytes(spec: BackwardSpec, tiles: BackwardTiles) -> int:
    """All shared memory of a block: the tiles, a full and an empty barrier per stage."""
    total = 0
    for name, n in tile_bytes(spec, tiles).items():
        step = 128 if name in ("dQ", "L", "D", "zeros", "pieces") else ALIGNMENT_BYTES
        total = -(-total // step) * step + n
    barriers = 2 * (tiles.q_stages + tiles.do_stages + 2 * tiles.kv_stages)
    if tiles.split is Split.ROLES:
        barriers += 3 * tiles.ds_stages + 2 * (tiles.cluster - 1)
    if tiles.persistent:
        barriers += 2 * WORK_STAGES
        total += 4 * WORK_WORDS * WORK_STAGES
    if converts_behind(spec, tiles):
        barriers += PIECE_STAGES * tiles.spare_warps
    return total + BARRIER_BYTES * barriers


def accumulator_registers(spec: BackwardSpec, tiles: BackwardTiles) -> tuple[int, ...]:
    """Registers of a thread of each consumer that hold matmul operands and results: dK, dV or one of them, and the larger of (S, dP, P) and
    (P, dS, dQ); in turn of (P, dP, dQ) and (dS, S, P). By roles dV, S, P; dK, dP, dS; half of dQ."""
    scores, dq = tiles.q // 2, tiles.q * spec.qk_width // (2 * roles.WARPGROUP_THREADS)
    if tiles.split is Split.ROLES:
        return spec.v_width // 2 + scores + scores // 2, spec.qk_width // 2 + scores + scores // 2, dq
    both = (spec.qk_width + spec.v_width) // 2
    if tiles.order is Order.IN_TURN:
        return (both + scores + scores // 2 + max(dq, scores // 2),) * tiles.consumers
    return (both + max(2 * scores + scores // 2, scores + dq),) * tiles.consumers


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
    if by_roles and min(stages) < 1:
        found.append(f"rings of Q, dO and dS need a stage, got {stages}")
    if tiles.cluster not in ((1, 2) if by_roles else (1,)):
        found.append(f"cluster must be 1, or 2 with roles, got {tiles.cluster}")
    if not by_roles and stages != (BLOCK_STAGES,) * 3:
        found.append(f"consumers that share keys have {BLOCK_STAGES} stages of Q, dO and dS, got {stages}")
    if by_roles and tiles.dq_path is DqPath.SHARED:
        found.append("consumers with roles have no sender: dQ leaves from registers, or in order")
    if tiles.persistent and (spec.is_ragged or by_roles or tiles.has_sender):
        found.append("persistent blocks need sequences of equal lengths, consumers that share keys, and dQ from registers")
    if tiles.order is Order.IN_TURN and (by_roles or tiles.has_sender or spec.softcap):
        found.append("turns need consumers that share keys, dQ from registers, and no softcap: dS is made from the 16-bit P")
    if spec.deterministic and tiles.dq_path is not DqPath.ORDERED:
        found.append(f"a deterministic backward needs the ordered path of dQ, got {tiles.dq_path.value}")
    if found:
        return found
    for need, there in zip(accumulator_registers(spec, tiles), consumer_registers(tiles), strict=True):
        if need + BESIDE_ACCUMULATORS > there:
            found.append(f"a consumer thread needs about {need + BESIDE_ACCUMULATORS} registers, {there} are there")
    smem = smem_bytes(spec, tiles)
    if smem > SMEM_PER_BLOCK_BYTES:
        found.append(f"shared memory: {smem} bytes of {SMEM_PER_BLOCK_BYTES}")
    return found
