"""What changes the code of the backward: `BackwardSpec` (what is asked) and `BackwardTiles` (how it is done). Together the key of its
three kernels. Pure Python, no compiler needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ...mask import MaskKind
from ...problem import DType
from ...sequences import SequenceKind
from .tiles import DENSE, SequenceLayout

KEYS_PER_CONSUMER = 64
"""Keys of one warpgroup: the M of Sᵀ = K·Qᵀ."""
CONSUMERS = 2


class DqPath(enum.Enum):
    """How a block's share of dQ reaches the float32 sum in global memory."""

    REGISTERS = "registers"  # 16-byte reductions right out of the accumulator
    SHARED = "shared"  # through shared memory and a sender warp, by bulk reduction
    ORDERED = "ordered"  # so, and the sender waits for its turn (backward_order): the same bits every time


class Order(enum.Enum):
    """How two consumers that share keys share the tensor cores."""

    TOGETHER = "together"  # they go in step, and meet at a barrier once dS is written
    IN_TURN = "in turn"  # one's matmuls under the other's softmax; a block's dQ comes beside the next block's dP


class Split(enum.Enum):
    """What the two consumers share between them."""

    KEYS = "keys"  # 64 keys each, all five matmuls
    ROLES = "roles"  # the same 64 keys: one makes P and dV, the other dS and dK, and each half of dQ's columns


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

    @property
    def consumers(self) -> int:
        return CONSUMERS

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def persistent(self) -> bool:
        return self.kv_stages > 1

    @property
    def has_sender(self) -> bool:
        return self.dq_path is not DqPath.REGISTERS

    @property
    def dq_transposed(self) -> bool:
        """Whether the consumers share dQ by columns, as dQᵀ = Kᵀ·dSᵀ, and not by rows: 64 queries are rows for one of them only."""
        return self.split is Split.KEYS and self.q == KEYS_PER_CONSUMER


def is_ranked(spec: BackwardSpec, tiles: BackwardTiles) -> bool:
    """Whether the device decides in which order key tiles are launched (backward_rank)."""
    return spec.is_ragged and tiles.dq_path is not DqPath.ORDERED


STATISTICS_TAIL = 4
"""32-bit words behind the L of a block's rows: whether some of them have a second part, the block's share of the sink's gradient, how many
key tiles have added to the block's dQ (DqPath.ORDERED), and in the first record the counter of backward_schedule."""
TURN_WORD, COUNTER_WORD = 2, 3
"""The last two."""


def statistics_words(tiles: BackwardTiles) -> int:
    """float32 words of a block's record: L of its rows and the tail, D, and the second part of L."""
    return 3 * tiles.q + STATISTICS_TAIL
