"""What a kernel is compiled for: plain data, hashable, without Triton."""

from __future__ import annotations

from dataclasses import dataclass

from ...mask import Mask, MaskKind


@dataclass(frozen=True)
class Tiles:
    """A kernel's choice: rows of queries, keys to a block, warps to a program, stages of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class BackwardTiles:
    """One choice for each kernel that matters. dv: where set, dV has a launch of its own, with these tiles, and dkdv makes dK only."""

    dkdv: Tiles
    dq: Tiles
    dv: Tiles | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """One operand's tile: `block` rows of `dim` columns, zero-filled to `width`. page_size 0: no pages. wide: offsets need 64 bits.
    align: all strides are multiples of so many elements.
    """

    block: int
    dim: int
    width: int
    page_size: int = 0
    wide: bool = False
    align: int = 1


@dataclass(frozen=True, kw_only=True)
class MaskCode:
    """What a mask changes in the code. ends_meet: the last query meets the last key of each sequence."""

    kind: MaskKind
    ends_meet: bool

    @classmethod
    def of(cls, mask: Mask) -> MaskCode:
        return cls(kind=mask.kind, ends_meet=mask.q_offset is None)

    @property
    def masked(self) -> bool:
        return self.kind is not MaskKind.FULL

    @property
    def chunked(self) -> bool:
        return self.kind is MaskKind.CHUNK

    @property
    def turned_kind(self) -> MaskKind:
        """Of the mask with queries and keys exchanged: an upper bound becomes a lower one."""
        return MaskKind.WINDOW if self.kind is MaskKind.CAUSAL else self.kind


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Everything that a kernel's code depends on besides the types of its arguments.

    even: no block is cut by the end of a sequence, and every row sees a key. pack: query heads that share a tile (1, or all of a key
    head). sign: of the scale.
    """

    queries: Block
    keys: Block
    values: Block
    outputs: Block
    mask: MaskCode
    heads_per_kv: int
    precision: str
    softcap: bool
    even: bool
    sign: int = 1
    pack: int = 1
    split: bool = False
    most_splits: int = 1

    @property
    def edges(self) -> bool:
        """Whether any block may be seen in part."""
        return self.mask.masked or not self.even
