"""What changes the code of the backward: `BackwardSpec` (what is asked) and `BackwardTiles` (how it is done). Together the key of its
three kernels. Pure Python, no compiler needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ...mask import MaskKind
from ...problem import DType
from ...sequences import SequenceKind
from .tiles import DENSE, SequenceLayout

KEYS_PER_CONSUMER = 64
"""Keys of one warpgroup: the M of Sᵀ = K·Qᵀ."""
CONSUMERS = 2
"""Warpgroups that read Q and dO."""


PRODUCER_WARPS = 4


class DqPath(enum.Enum):
    """How a block's share of dQ reaches the float32 sum in global memory."""

    REGISTERS = "registers"  # 16-byte reductions right out of the accumulator
    SHARED = "shared"  # through shared memory and a sender warp, by bulk reduction
    ORDERED = "ordered"  # whoever adds waits for its turn (backward_order): the same bits every time. Split.KEYS: that is the sender warp


class Order(enum.Enum):
    """How two consumers that share keys share the tensor cores."""

    TOGETHER = "together"  # they go in step, and meet at a barrier once dS is written
    IN_TURN = "in turn"  # one's matmuls under the other's softmax; a block's dQ comes beside the next block's dP


class Split(enum.Enum):
    """What the consumers share between them."""

    KEYS = "keys"  # two of them: 64 keys each, all five matmuls
    ROLES = "roles"  # three, the same 64 keys: one makes P and dV, one dS and dK, one dQ


@dataclass(frozen=True, kw_only=True)
class BackwardSpec:
    """What the backward computes. Numbers that may change without another kernel (lengths, strides, scale, window widths) are not here."""

    dtype: DType = DType.BF16
    out_dtype: DType = DType.BF16
    qk_width: int
    v_width: int
    heads_per_kv: int = 1
    mask_kind: MaskKind = MaskKind.FULL
    q_layout: SequenceLayout = DENSE
    k_layout: SequenceLayout = DENSE
    softcap: bool = False
    sink: bool = False
    lse_gradient: bool = False
    deterministic: bool = False

    @property
    def is_ragged(self) -> bool:
        """Lengths live on the device and differ from sequence to sequence."""
        return self.q_layout.kind is not SequenceKind.DENSE or self.k_layout.kind is not SequenceKind.DENSE


@dataclass(frozen=True, kw_only=True)
class BackwardTiles:
    """How the backward is cut up. `backward_budget.problems` says whether a GPU can hold it.

    q: rows of a block of queries; kv: keys of a work tile; q_stages, do_stages, ds_stages: depths of the rings of Q, dO and dS; kv_stages:
    with 2, blocks are persistent and the next tile's K and V come while this one is worked on, with 1 each tile has a block of its own.
    cluster: Split.ROLES: so many neighbouring tiles walk together; their blocks exchange dS, and each makes its share of dQ's columns for
    the keys of all: so many times fewer additions in global memory.
    """

    q: int
    kv: int = CONSUMERS * KEYS_PER_CONSUMER
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    kv_stages: int = 1
    dq_path: DqPath = DqPath.REGISTERS
    split: Split = Split.KEYS
    order: Order = Order.TOGETHER
    cluster: int = 1

    @property
    def consumers(self) -> int:
        return CONSUMERS if self.split is Split.KEYS else CONSUMERS + 1

    @property
    def walk_keys(self) -> int:
        """Keys of the tiles that walk together."""
        return self.cluster * self.kv

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def persistent(self) -> bool:
        return self.kv_stages > 1

    @property
    def has_sender(self) -> bool:
        return self.dq_path is not DqPath.REGISTERS and self.split is Split.KEYS

    @property
    def first_spare_warp(self) -> int:
        """Of the producer warpgroup: the warps before it load and send."""
        return 2 if self.has_sender else 1

    @property
    def spare_warps(self) -> int:
        return PRODUCER_WARPS - self.first_spare_warp

    @property
    def dq_transposed(self) -> bool:
        """Whether the consumers share dQ by columns, as dQᵀ = Kᵀ·dSᵀ, and not by rows: 64 queries are rows for one of them only."""
        return self.split is Split.KEYS and self.q == KEYS_PER_CONSUMER


def is_ranked(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether the device decides in which order key tiles are launched (backward_rank)."""
    return spec.is_ragged and tiles.dq_path is not DqPath.ORDERED


STATISTICS_TAIL = 4
"""32-bit words behind the L of a block's rows: whether some of them have a second part, the block's share of the sink's gradient, how many
key tiles have added to the block's dQ (DqPath.ORDERED), and in the first record the counter of backward_schedule, in a column's that of
backward_behind."""
TURN_WORD, COUNTER_WORD = 2, 3
"""The last two."""


def statistics_words(tiles: BackwardTiles) -> int:
    """float32 words of a block's record: L of its rows and the tail, and D."""
    return 2 * tiles.q + STATISTICS_TAIL


def tiles_of(length: Any, tiles: BackwardTiles) -> Any:
    """Tiles of so many keys. In a cluster the last one may be empty."""
    return (length + tiles.walk_keys - 1) // tiles.walk_keys * tiles.cluster


def clears_ahead(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether tiles clear the sum of dQ ahead of each other (backward_clear): it is added up in no order, and columns are of one size."""
    return tiles.dq_path is not DqPath.ORDERED and not spec.is_ragged


def converts_behind(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether tiles convert the sum of dQ behind each other (backward_behind): where it pays, and there is room for the pieces."""
    pays = tiles.order is Order.IN_TURN or (tiles.split is Split.KEYS and spec.softcap)  # with a softcap ptxas also spills less then
    return clears_ahead(spec, tiles) and not tiles.persistent and pays


def starts_early(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether a block waits for K with its first Q, and for V with its first dO: where that pays."""
    return not tiles.persistent and tiles.split is Split.KEYS and tiles.order is Order.TOGETHER and not spec.softcap


ZERO_WORDS = 256
"""float32 zeros in shared memory, which bulk copies put into the sum (backward_clear)."""
PIECE_FOURS = 2
"""float4s of each of a consumer's threads in a piece of the sum (backward_behind)."""
PIECE_WORDS = PIECE_FOURS * 4 * 128
PIECE_STAGES = 3
"""Pieces under way to a spare warp."""
