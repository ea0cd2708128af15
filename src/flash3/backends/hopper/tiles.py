"""What changes the code of the forward: `ForwardSpec` (what is asked) and `Tiles` (how it is done). Together the key of a kernel.

Pure Python, no compiler needed. `ForwardSpec` is the normal form of `problem.Spec`: two problems with one ForwardSpec run the
same machine code, so head dims that share a tile width share a kernel.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ...mask import MaskKind
from ...problem import DType
from ...sequences import SequenceKind

ROWS_PER_CONSUMER = 64
"""Query rows of one warpgroup: the M of a wgmma."""
WIDTHS = (32, 64, 96, 128, 192, 256)
"""Tile widths of head_dim and value_dim. Narrower tensors are filled up with zeros by TMA."""


SEQUENCE_LIMIT = 1 << 24
"""Rows of the longest packed or padded sequence: extents.py says why there is a limit."""


class ScaleSign(enum.Enum):
    """Sign of the softmax scale. The row maximum is taken before scaling, so the code must know it."""

    POSITIVE = "positive"
    NEGATIVE = "negative"
    ZERO = "zero"


class QuerySource(enum.Enum):
    """Where the A operand of Q·Kᵀ comes from."""

    SHARED = "shared"
    REGISTERS = "registers"  # copied once per tile: saves a third of the shared-memory traffic of Q·Kᵀ


class Overlap(enum.Enum):
    """Algorithm 2 runs the softmax of block j beside P·V of block j-1; Algorithm 1 runs in order."""

    SOFTMAX_UNDER_PV = "softmax under pv"
    IN_ORDER = "in order"


class Turns(enum.Enum):
    """Ping-pong: consumers issue their matmuls in a fixed cycle, so that one's softmax lies under another's matmuls."""

    PING_PONG = "ping-pong"
    FREE = "free"


class FirstBlock(enum.Enum):
    """How a consumer starts where the mask hides the right half of its first block."""

    WHOLE = "whole"
    HALF = "half"


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """How the rows of one side lie, and which of the optional arrays come along."""

    kind: SequenceKind = SequenceKind.DENSE
    used: bool = False
    leftpad: bool = False
    batch_index: bool = False


DENSE = SequenceLayout()


@dataclass(frozen=True, kw_only=True)
class ForwardSpec:
    """What a forward kernel computes. Numbers that may change without another kernel (lengths, strides, window widths) are not here."""

    dtype: DType = DType.BF16
    out_dtype: DType = DType.BF16
    qk_width: int
    v_width: int
    heads_per_kv: int = 1
    mask_kind: MaskKind = MaskKind.FULL
    q_layout: SequenceLayout = DENSE
    k_layout: SequenceLayout = DENSE
    scale_sign: ScaleSign = ScaleSign.POSITIVE
    softcap: bool = False
    sink: bool = False
    lse: bool = True

    @property
    def is_ragged(self) -> bool:
        """Lengths live on the device and differ from sequence to sequence."""
        return self.q_layout.kind is not SequenceKind.DENSE or self.k_layout.kind is not SequenceKind.DENSE


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a forward kernel is cut up. `budget.problems` says whether a GPU can hold it.

    q, kv: rows of a query tile (64 per consumer warpgroup) and of a block of keys; heads: query heads of one key head that share a tile,
    whose row r is then query r // heads of head r % heads; stages: depth of the K and V rings;
    o_columns: columns of O in shared memory at a time; parts: pieces of a block's keys whose softmax starts when their scores are
    there; hold: percent of a block's (last part's) exponentials that come before the wait for P·V (0: wherever ptxas likes);
    first_block: whether one whose right half the mask hides takes half the work.
    """

    q: int
    kv: int
    stages: int
    o_columns: int
    query_source: QuerySource = QuerySource.REGISTERS
    overlap: Overlap = Overlap.SOFTMAX_UNDER_PV
    turns: Turns = Turns.FREE
    parts: int = 1
    hold: int = 0
    first_block: FirstBlock = FirstBlock.WHOLE
    heads: int = 1

    @property
    def queries(self) -> int:
        """Of one head in a tile."""
        return self.q // self.heads

    def query_of(self, row: Any) -> Any:
        """The query, counted from the tile's first, of a row: an int or a kernel's Int32."""
        return row if self.heads == 1 else row // self.heads

    @property
    def queries_per_consumer(self) -> int:
        return ROWS_PER_CONSUMER // self.heads

    @property
    def consumers(self) -> int:
        return self.q // ROWS_PER_CONSUMER

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)
