"""FlashAttention-3's forward in plain loops: the paper's Algorithm 1 (in order) and Algorithm 2 (pipelined), equal to the oracle.

A tile of query rows visits blocks of keys from right to left, as the kernels do: right edge (masked), interior (not masked), left
edge (masked). Matmuls take the inputs' dtype and accumulate in float32, as do the statistics; P̃ is rounded to the inputs' dtype (E4M3 for
FP8) before it meets V, as the tensor cores take it. Float64 inputs: everything in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..mask import KeyBlocks
from ..problem import Request
from .parts import Part, Result, parts
from .plain import FLOAT8, P_MAX_LOG2, output_dtype

LN2 = math.log(2)
Visit = tuple[int, bool]
"""A block of keys, and whether the mask has to be applied to it."""


def right_to_left(blocks: KeyBlocks) -> Iterator[Visit]:
    """The order in which a tile visits its key blocks."""
    for j in reversed(range(blocks.full_end, blocks.end)):
        yield j, True
    for j in reversed(range(blocks.full_begin, blocks.full_end)):
        yield j, False
    for j in reversed(range(blocks.begin, blocks.full_begin)):
        yield j, True


@dataclass
class OnlineSoftmax:
    """Running row maximum m and row sum ℓ of a tile's rows, both (group, rows, 1) in the dtype of the statistics.

    p_dtype: that of P̃ as the tensor cores take it.
    lazy_log2: keep the old maximum while the new one is at most 2**lazy_log2 times larger after exp (FlashAttention-4's conditional
    rescaling): P̃ then grows up to that factor, and O needs no rescaling. 0: the paper's rule.
    """

    row_max: Tensor
    row_sum: Tensor
    p_dtype: torch.dtype
    lazy_log2: float

    @classmethod
    def begin(cls, o: Tensor, p_dtype: torch.dtype, lazy_log2: float = 0.0) -> OnlineSoftmax:
        """m = -inf and ℓ = 0 for the rows of o (group, rows, value_dim)."""
        column = o[..., :1]
        return cls(torch.full_like(column, -torch.inf), torch.zeros_like(column), p_dtype, lazy_log2)

    def update(self, s: Tensor) -> tuple[Tensor, Tensor]:
        """Take in one block of scores (group, rows, keys). Returns P̃ = exp(S - m), rounded, and alpha = exp(m_old - m) for O."""
        new_max = torch.maximum(self.row_max, s.amax(-1, keepdim=True))
        grown = new_max > self.row_max + self.lazy_log2 * LN2
        new_max = torch.where(grown, new_max, self.row_max)
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
        alpha = torch.exp(self.row_max - shift)
        p = torch.exp(s - shift)
        self.row_sum = alpha * self.row_sum + p.sum(-1, keepdim=True)
        self.row_max = new_max
        return self._rounded(p), alpha

    def _rounded(self, p: Tensor) -> Tensor:
        """E4M3 holds P̃ times a power of two, so that its few exponents cover the small probabilities; V's product is scaled back."""
        up = 2.0 ** (P_MAX_LOG2 - self.lazy_log2) if self.p_dtype is torch.float8_e4m3fn else 1.0
        return (p * up).to(self.p_dtype).to(p.dtype) / up

    def finish(self, o: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """O / ℓ (0 for an empty row) and L = m + log ℓ (group, rows). The sink is one last key, whose value is 0."""
        if sink is not None:
            _, alpha = self.update(sink[:, None, None].expand_as(self.row_max))
            o = alpha * o
        lse = self.row_max + torch.log(self.row_sum)
        return torch.where(self.row_sum > 0, o / self.row_sum, 0.0), lse.squeeze(-1)


@dataclass(frozen=True)
class QueryTile:
    """Rows `rows` of a part, and its keys in blocks of `block`."""

    part: Part
    rows: slice
    block: int

    def scores(self, j: int, masked: bool) -> Tensor:
        """S = scale·Q K_jᵀ (group, rows, keys of block j), capped, with -inf where masked and hidden."""
        part, keys = self.part, slice(j * self.block, (j + 1) * self.block)
        s = part.q[:, self.rows] @ part.k[keys].mT
        if part.qv is not None:
            s = s + part.qv[:, self.rows] @ part.v[keys].mT
        s = part.scale * s
        if part.softcap:
            s = part.softcap * torch.tanh(s / part.softcap)
        return s.masked_fill(~part.seen[self.rows, keys], -torch.inf) if masked else s

    def output(self, p: Tensor, j: int) -> Tensor:
        """P̃ V_j."""
        return p @ self.part.v[j * self.block : (j + 1) * self.block]


Algorithm = Callable[[QueryTile, Iterator[Visit], OnlineSoftmax, Tensor], Tensor]
"""Takes a tile, its visits in order, its softmax state and O = 0; returns O, not yet divided by ℓ."""


def in_order(tile: QueryTile, visits: Iterator[Visit], softmax: OnlineSoftmax, o: Tensor) -> Tensor:
    """Algorithm 1, the consumer's loop: each block's scores, softmax and output, one after the other."""
    for j, masked in visits:
        s = tile.scores(j, masked)
        p, alpha = softmax.update(s)
        o = alpha * o + tile.output(p, j)
    return o


def pipelined(tile: QueryTile, visits: Iterator[Visit], softmax: OnlineSoftmax, o: Tensor) -> Tensor:
    """Algorithm 2: Q K_jᵀ is issued, then P̃ V of the block before it, and the softmax of block j runs under that second matmul."""
    first = next(visits, None)
    if first is None:
        return o
    current = first[0]
    p, _ = softmax.update(tile.scores(*first))
    for j, masked in visits:
        s_next = tile.scores(j, masked)  # S_next = Q K_jᵀ           (issued)
        o = o + tile.output(p, current)  # O += P̃_cur V_{j-1}        (issued behind it)
        p, alpha = softmax.update(s_next)  # wait for S_next; the softmax under P̃_cur V_{j-1}
        o = alpha * o  # wait for P̃_cur V_{j-1}; rescale O
        current = j
    return o + tile.output(p, current)


@torch.no_grad()
def blockwise(
    request: Request, *, algorithm: Algorithm = pipelined, tile_q: int = 64, tile_kv: int = 64, lazy_log2: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Attention by `algorithm` (in_order or pipelined) over tiles of tile_q query rows and blocks of tile_kv keys.

    Returns:
        out in the request's output dtype (q's by default, bfloat16 for FP8), q's shape with value_dim; lse float32 (float64 for float64
        inputs), natural logarithm, (batch, heads_q, q_len) or packed (heads_q, total_q).
    """
    dtype = torch.float64 if request.q.dtype == torch.float64 else torch.float32
    p_dtype = torch.float8_e4m3fn if request.q.dtype in FLOAT8 else request.q.dtype
    result = Result.empty(request, output_dtype(request), dtype)
    for part in parts(request, dtype):
        (q_len, k_len), (group, _, _) = part.seen.shape, part.q.shape
        for first in range(0, q_len, tile_q):
            rows = slice(first, min(first + tile_q, q_len))
            visits = right_to_left(request.mask.key_blocks(rows.start, rows.stop - 1, q_len, k_len, tile_kv))
            o = torch.zeros(group, rows.stop - first, part.v.shape[-1], dtype=dtype, device=part.v.device)
            softmax = OnlineSoftmax.begin(o, p_dtype, lazy_log2)
            o = algorithm(QueryTile(part, rows, tile_kv), visits, softmax, o)
            result.put(part, *softmax.finish(o, part.sink), rows)
    return result.shaped(request)
