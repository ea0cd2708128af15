"""mask.py's own arithmetic as Triton functions: one source for what is visible, on the CPU, in tests and in these kernels."""

import ast
import inspect
import linecache
import types
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ... import mask
from ...mask import MaskKind


class Bounds(NamedTuple):
    """mask.Bounds, as a tuple that Triton passes to a kernel."""

    left: Any
    right: Any
    chunk: Any
    q_offset: Any
    k_offset: Any


class KeyBlocks(NamedTuple):
    """mask.KeyBlocks, and of query blocks the same four numbers."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


# Inside of a kernel a module's attributes may be read, an enum's may not.
KINDS = types.ModuleType("KINDS")
for kind in MaskKind:
    setattr(KINDS, kind.name, kind)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b)


@triton.jit
def maximum(a, b):
    return tl.maximum(a, b)


class _ForKernels(ast.NodeTransformer):
    """Without what Triton cannot read: annotations, functions as arguments (`minimum` and `maximum` are global here), and code behind an
    early return (it goes into an `else`).
    """

    def visit_FunctionDef(self, node):
        node.args.args = [ast.arg(a.arg) for a in node.args.args if a.arg not in ("minimum", "maximum")]
        node.args.defaults, node.returns = [], None
        for i, statement in enumerate(node.body):
            if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
                statement.orelse, node.body = node.body[i + 1 :], node.body[: i + 1]
                break
        return self.generic_visit(node)

    def visit_Call(self, node):
        node.args = [a for a in node.args if not (isinstance(a, ast.Name) and a.id in ("minimum", "maximum"))]
        return self.generic_visit(node)


def _kernel_function(function, **names):
    """A function of mask.py for kernels: the same lines, with `names` as global names."""
    tree = _ForKernels().visit(ast.parse(inspect.getsource(function)))
    source, name = ast.unparse(ast.fix_missing_locations(tree)), function.__name__
    file = f"<{mask.__name__}.{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file  # where Triton looks the source up
    own = {"__name__": __name__, "tl": tl, "minimum": minimum, "maximum": maximum, **names}
    exec(compile(source, file, "exec"), own)
    return triton.jit(own[name])


visible_keys = _kernel_function(mask.visible_keys, MaskKind=KINDS)
key_blocks = _kernel_function(mask.key_blocks, KeyBlocks=KeyBlocks, visible_keys=visible_keys)


@triton.jit
def settled(bounds, q_len, k_len, SPEC: tl.constexpr):
    """A sequence's own bounds. For chunks both offsets move by whole chunks until no position is negative: Triton's // rounds to zero."""
    q_offset, k_offset = bounds.q_offset, bounds.k_offset
    if SPEC.mask.ends_meet:
        q_offset = k_len - q_len
    if SPEC.mask.chunked:
        below = tl.maximum(0, -tl.minimum(q_offset, k_offset))
        shift = (below + bounds.chunk - 1) // bounds.chunk * bounds.chunk
        q_offset, k_offset = q_offset + shift, k_offset + shift
    return Bounds(bounds.left, bounds.right, bounds.chunk, q_offset, k_offset)


@triton.jit
def blocks_of_queries(first_key, last_key, q_len, bounds, SPEC: tl.constexpr):
    """Blocks of query rows that see any of these keys: `key_blocks` of the transposed mask, which is a mask too.

    A row sees a key no further than `left` before and `right` behind it; so the key is seen `right` before and `left` behind by rows.
    """
    KIND: tl.constexpr = SPEC.mask.turned_kind
    turned = Bounds(bounds.right, bounds.left, bounds.chunk, bounds.k_offset, bounds.q_offset)
    return key_blocks(first_key, last_key, q_len, SPEC.queries.block, turned, KIND)


@triton.jit
def seen_by(rows, k_len, bounds, SPEC: tl.constexpr):
    """First and one-past-last visible key of each of a vector of rows, as two vectors."""
    KIND: tl.constexpr = SPEC.mask.kind
    begin, end = visible_keys(rows, k_len, bounds, KIND)
    nothing = tl.zeros_like(rows)
    return begin + nothing, end + nothing


@triton.jit
def blocks_of_keys(first_row, last_row, k_len, bounds, SPEC: tl.constexpr):
    """Blocks of keys that these rows see."""
    KIND: tl.constexpr = SPEC.mask.kind
    return key_blocks(first_row, last_row, k_len, SPEC.keys.block, bounds, KIND)


class Walk(NamedTuple):
    """Blocks in the order of a kernel's two loops: `edges` masked ones, of which `left` lie before the gap, then the interior."""

    begin: Any
    left: Any
    edges: Any
    full_begin: Any
    interior: Any


@triton.jit
def walk(blocks, begin, end):
    """How the blocks begin … end − 1 out of `blocks` are walked."""
    full_begin = tl.minimum(tl.maximum(blocks.full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(blocks.full_end, full_begin), end)
    left = full_begin - begin
    interior = full_end - full_begin
    edges = tl.maximum(end - begin, 0) - interior
    return Walk(begin, left, edges, full_begin, interior)


@triton.jit
def step(walked, i, MASKED: tl.constexpr):
    """The number of the i-th block of one of the loops."""
    if MASKED:
        return walked.begin + i + tl.where(i >= walked.left, walked.interior, 0)
    else:
        return walked.full_begin + i
