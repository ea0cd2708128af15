"""Does it fit: shared memory, registers and named barriers of a (ForwardSpec, Tiles), in plain Python. ptxas agrees (a test)."""

from __future__ import annotations

from . import roles
from .tiles import ROWS_PER_CONSUMER, WIDTHS, FirstBlock, ForwardSpec, QuerySource, Tiles

SMEM_PER_BLOCK_BYTES = 227 * 1024
ALIGNMENT_BYTES = 1024
"""Tiles start at multiples of the swizzle pattern."""
BARRIER_BYTES = 8
WORK_STAGES = 2
"""Depth of the pipe that carries work tiles from producer to consumers."""


def work_words(spec: ForwardSpec) -> int:
    """int32 words of a work tile in shared memory: q_block, head, batch, valid, and for ragged batches both extents."""
    return 8 if spec.is_ragged else 4


def tile_bytes(spec: ForwardSpec, tiles: Tiles) -> dict[str, int]:
    """Bytes of each buffer in shared memory, in the order of their addresses."""
    size = spec.dtype.bytes
    return {
        "Q": size * tiles.q * spec.qk_width,
        "K": size * tiles.kv * spec.qk_width * tiles.stages,
        "V": size * tiles.kv * spec.v_width * tiles.stages,
        "O": spec.out_dtype.bytes * tiles.q * tiles.o_columns,
    }


def smem_bytes(spec: ForwardSpec, tiles: Tiles) -> int:
    """All shared memory of a block: the tiles, a full and an empty barrier per stage, the work tiles."""
    total = sum(-(-n // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for n in tile_bytes(spec, tiles).values())
    barriers = 2 * (tiles.consumers + 2 * tiles.stages + WORK_STAGES)
    return total + BARRIER_BYTES * barriers + 4 * work_words(spec) * WORK_STAGES


def accumulator_registers(spec: ForwardSpec, tiles: Tiles) -> int:
    """Registers of a consumer thread that hold matmul operands and results: S, P, O, and Q where it lives there."""
    q = spec.qk_width // 4 if tiles.query_source is QuerySource.REGISTERS else 0
    return tiles.kv // 2 + tiles.kv // 4 + spec.v_width // 2 + q


BESIDE_ACCUMULATORS = 28
"""Registers that a loop needs besides them: addresses, row statistics, phases, a mask's numbers. With fewer ptxas spills."""


def problems(spec: ForwardSpec, tiles: Tiles) -> list[str]:
    """Why these tiles cannot run, one sentence each; empty when they can."""
    found = []
    if spec.qk_width not in WIDTHS or spec.v_width not in WIDTHS:
        found.append(f"tile widths must be among {WIDTHS}, got {spec.qk_width} and {spec.v_width}")
    if tiles.q % ROWS_PER_CONSUMER or tiles.q == 0:
        found.append(f"q must be a multiple of {ROWS_PER_CONSUMER}, got {tiles.q}")
    if tiles.kv % 16 or not 16 <= tiles.kv <= 256:
        found.append(f"kv must be a multiple of 16 from 16 to 256, got {tiles.kv}")
    if tiles.parts < 1 or tiles.kv % (16 * tiles.parts):
        found.append(f"parts must split {tiles.kv} keys into multiples of 16, got {tiles.parts}")
    if tiles.first_block is FirstBlock.HALF and tiles.kv % 32:
        found.append(f"half a first block needs kv a multiple of 32, got {tiles.kv}")
    if tiles.heads < 1 or spec.heads_per_kv % tiles.heads or ROWS_PER_CONSUMER % tiles.heads:
        found.append(f"heads must divide {spec.heads_per_kv} query heads per key head and {ROWS_PER_CONSUMER} rows, got {tiles.heads}")
    if tiles.stages < 1:
        found.append(f"stages must be at least 1, got {tiles.stages}")
    if tiles.o_columns <= 0 or spec.v_width % tiles.o_columns or tiles.o_columns % 32:
        found.append(f"o_columns must be a multiple of 32 that divides {spec.v_width}, got {tiles.o_columns}")
    if found:
        return found
    if not roles.is_known(tiles):
        found.append(f"no split of the registers for {tiles.consumers} consumers")
        return found
    total = registers_held(tiles)
    if total > roles.entry_registers(tiles) * tiles.threads:
        found.append(f"the roles ask for {total} registers, {roles.entry_registers(tiles) * tiles.threads} are there at entry")
    need = accumulator_registers(spec, tiles) + BESIDE_ACCUMULATORS
    if need > roles.consumer_registers(tiles):
        found.append(f"a consumer thread needs about {need} registers, {roles.consumer_registers(tiles)} are there")
    smem = smem_bytes(spec, tiles)
    if smem > SMEM_PER_BLOCK_BYTES:
        found.append(f"shared memory: {smem} bytes of {SMEM_PER_BLOCK_BYTES}")
    return found


def registers_held(tiles: Tiles) -> int:
    """What producer and consumers hold together after setmaxnreg."""
    threads = roles.WARPGROUP_THREADS
    return threads * (roles.producer_registers(tiles) + tiles.consumers * roles.consumer_registers(tiles))
