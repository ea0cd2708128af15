"""The public attention functions on torch tensors, and their gradient."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ...dispatch import Explanation
from ...mask import FULL, Mask
from ...problem import Problem, check_differentiable, check_options
from ...settings import deciding
from . import operators, recall
from .describe import DTYPES, describe
from .operators import Arguments, mask_numbers


class Attention(torch.autograd.Function):
    """attention_lse with its closed-form gradient; takes Arguments, flat, and then whether the LSE has a gradient too. (Where it has, a
    compiled program brings a gradient of zeros for an LSE that nobody uses.)
    """

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, Tensor]:
        return operators.attention_lse(*flat[:-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *arguments, lse_has_gradient = inputs
        tensors = [x if isinstance(x, Tensor) else None for x in arguments]
        ctx.save_for_backward(*output, *tensors)
        ctx.values = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.set_materialize_grads(False)
        ctx.lse_has_gradient = lse_has_gradient
        if not lse_has_gradient:
            ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        inputs = [value if tensor is None else tensor for tensor, value in zip(tensors, ctx.values, strict=True)]
        d_lse = d_lse if ctx.lse_has_gradient else None
        grads = gradients(d_out, d_lse, out, lse, list(ctx.needs_input_grad[:4]), inputs)  # q, k, v, sink come first
        return (*grads, *(None,) * (len(inputs) + 1 - len(grads)))


def gradients(
    d_out: Tensor | None, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], inputs: Sequence[Any]
) -> list[Tensor | None]:
    """Of q, k, v and sink, those that are needed. inputs: Arguments."""
    if d_out is None and d_lse is None:
        return [None] * len(needs)
    given = torch.zeros_like(out) if d_out is None else d_out
    grads = _derivative(given, d_lse, *inputs[:3])(given, d_lse, out, lse, needs, *inputs)
    return [g if need else None for g, need in zip(grads, needs, strict=True)]


def _derivative(d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Callable[..., Sequence[Tensor]]:
    """How attention_backward is called."""
    if torch.compiler.is_compiling():
        return operators.attention_backward
    return operators.backward if _is_last(d_out, d_lse, q, k, v) else AttentionBackward.apply


def _is_last(d_out: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether nobody can want a gradient of this one, nor watches it: autograd then runs a backward without grad mode."""
    return not torch.is_grad_enabled() and operators.plain(d_out, d_lse) and operators.unwatched(q, k, v)


class RememberedAttention(torch.autograd.Function):
    """Attention, by a path that was remembered: takes the path and the tensors that are given."""

    @staticmethod
    def forward(ctx: Any, path: DifferentiablePath, q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = path.forward(q, k, v, *others)
        ctx.path = path
        ctx.save_for_backward(out, lse, q, k, v, *others)
        ctx.set_materialize_grads(False)
        return (out, lse) if path.return_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        out, lse, *tensors = ctx.saved_tensors
        path: DifferentiablePath = ctx.path
        derive = path.gradient(d_out, d_lse, tensors)
        if derive is not None:
            assert d_out is not None
            needed = ctx.needs_input_grad
            all_grads = derive(operators.rows(d_out), d_lse, out, lse, tensors, any(needed[4:5]))  # a sink comes fourth
            found = [g if need else None for g, need in zip(all_grads, needed[1:], strict=False)]
            return (None, *found, *[None] * (len(tensors) - len(found)))
        inputs = path.rest._replace(**dict(zip(path.names, tensors, strict=True)))  # type: ignore[arg-type]
        needs = [name in path.names and ctx.needs_input_grad[1 + path.names.index(name)] for name in ("q", "k", "v", "sink")]
        grads = gradients(d_out, d_lse, out, lse, needs, inputs)
        by_name = dict(zip(("q", "k", "v", "sink"), grads, strict=True))
        return (None, *(by_name.get(name) for name in path.names))


@dataclass(frozen=True)
class DifferentiablePath:
    """forward takes the tensors called names; rest is what else the call said."""

    forward: recall.Path
    names: list[str]
    rest: Arguments
    return_lse: bool
    gradients: dict[Any, recall.GradientPath | None] = field(default_factory=dict)
    """By what decides, besides the call, which backend it is."""

    def gradient(self, d_out: Tensor | None, d_lse: Tensor | None, tensors: list[Tensor]) -> recall.GradientPath | None:
        """The short way for this gradient, if it may be taken. tensors: like those of the call that was remembered."""
        if d_out is None or not _is_last(d_out, d_lse, *tensors[:3]):
            return None
        key = deciding(), dispatch.choose, len(dispatch.BACKENDS)
        if key not in self.gradients:
            inputs = self.rest._replace(**dict(zip(self.names, tensors, strict=True)))  # type: ignore[arg-type]
            self.gradients[key] = recall.gradient(inputs)
        return self.gradients[key]

    @staticmethod
    def of(forward: recall.Path, a: Arguments, return_lse: bool) -> recall.Path:
        names = [name for name, value in a._asdict().items() if isinstance(value, Tensor)]
        rest = a.with_backend()._replace(**dict.fromkeys(names))  # type: ignore[arg-type]
        # Function.apply itself first looks for what a guard has excluded (transforms of torch.func), for a third of its time.
        apply = super(torch.autograd.Function, RememberedAttention).apply
        return functools.partial(apply, DifferentiablePath(forward, names, rest, return_lse))


class AttentionBackward(torch.autograd.Function):
    """attention_backward, which has no gradient of its own: whoever asks for one is told so. (torch's `once_differentiable` lets the
    second derivative of a loss that is linear in `out` vanish in silence.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*flat: Any) -> tuple[Tensor, ...]:
        return operators.attention_backward(*flat)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("attention has no second derivative: a gradient was wanted of its gradient")


def run(arguments: Arguments, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Call the operator that the request needs: without a gradient, none is paid for."""
    a = arguments
    a.check_types()
    tracked = (a.q, a.k, a.v) if a.sink is None else (a.q, a.k, a.v, a.sink)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tracked):
        check_differentiable(DTYPES.get(a.q.dtype, str(a.q.dtype)), a.qv is not None)
        if torch.compiler.is_compiling():
            out, lse = Attention.apply(*_apart(a), return_lse)
        else:
            a = a.with_backend()
            if operators.unwatched(a.q, a.k, a.v):
                operators.backward_plan(a)  # a gradient that no backend has is refused now, not in the middle of training
            out, lse = Attention.apply(*a, return_lse)
        return (out, lse) if return_lse else out
    return run_without_gradient(a, return_lse)


def _apart(a: Arguments) -> list[Any]:
    """Each tensor once, as Dynamo wants an autograd.Function's arguments: where one repeats (k as v, one cu_seqlens for both), a view."""
    kept: list[Any] = []
    for x in a:
        kept.append(x.view_as(x) if isinstance(x, Tensor) and any(x is y for y in kept) else x)
    return kept


def run_without_gradient(a: Arguments, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """Straight to the backend where nothing watches (an operator costs as much host time as a launch), else through the operator."""
    if not torch.compiler.is_compiling() and operators.unwatched(a.q, a.k, a.v):
        out, lse = operators.forward(a, return_lse)
        return out if lse is None else (out, lse)
    return operators.attention_lse(*a) if return_lse else operators.attention(*a)


def check_tensors(**named: Any) -> None:
    """Each value must be a torch.Tensor.

    Raises:
        TypeError: one is not; the message names it.
    """
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def options(mask: Mask | None, scale: float | None, softcap: float) -> dict[str, Any]:
    """mask, scale and softcap, checked, as fields of Arguments. While a program is traced they may be symbols: the operator checks then."""
    if not torch.compiler.is_compiling():
        check_options(FULL if mask is None else mask, scale, softcap)
    return {**mask_numbers(mask), "scale": scale, "softcap": softcap}


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale·QKᵀ)V, of a batch of equally long sequences (FlashAttention-3, Algorithms 1 and 2).

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32, float64 or float8.
        k: (batch, seqlen_k, heads_kv, head_dim); heads_q must be a multiple of heads_kv (grouped queries).
        v: (batch, seqlen_k, heads_kv, value_dim).
        mask: which keys each query sees; None is all. See `Mask`.
        scale: factor on the scores, any finite number; default head_dim ** -0.5.
        softcap: c > 0 replaces each score s by c·tanh(s / c), before the mask. 0 is off.
        sink: float32 (heads_q,), an extra logit per head in the softmax's denominator.
        return_lse: also return the log-sum-exp of the scores (differentiable).
        deterministic: the backward gives bitwise the same gradients each time.
        backend: name of a backend; None takes the first that supports the call (`explain` tells which and why).

    Returns:
        out (batch, seqlen_q, heads_q, value_dim) in q's dtype (float8: bfloat16); with return_lse (out, lse), lse float32
        (batch, heads_q, seqlen_q), natural logarithm. A query that sees no key has out 0 and lse −inf (with a sink: lse = sink).

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, its value and what is allowed.
        NotImplementedError: no backend supports the combination; the message lists each with its reason.
    """
    tensors = (q, k, v) if sink is None else (q, k, v, sink)
    said = recall.saying(mask, scale, type(scale), softcap, type(softcap), return_lse, deterministic, backend, sink is None)
    path = recall.find(said, tensors)
    if path is not None:
        return path(*tensors)
    check_tensors(q=q, k=k, v=v)
    arguments = Arguments(q, k, v, sink=sink, deterministic=deterministic, backend=backend, **options(mask, scale, softcap))
    result = run(arguments, return_lse)
    recall.remember(said, tensors, arguments, return_lse, DifferentiablePath.of)
    return result


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over sequences of unequal length, packed one after another or padded.

    Args:
        q: packed (total_q, heads_q, head_dim); with cu_seqlens_q None, padded (batch, seqlen_q, heads_q, head_dim).
        k: packed (total_k, heads_kv, head_dim); with cu_seqlens_k None, padded (batch, seqlen_k, heads_kv, head_dim).
        v: as k, with value_dim.
        cu_seqlens_q: int32 (batch + 1,), starts of the sequences and the end of the last.
        cu_seqlens_k: likewise for k and v.
        max_seqlen_q: length of the longest sequence; an int, a tensor (never read back), or None.
        max_seqlen_k: likewise.
        seqused_q: int32 (batch,), how many rows of each sequence count, in packed or padded storage.
        seqused_k: likewise.
        mask, scale, softcap, sink, return_lse, deterministic, backend: as in `attention`; the mask is aligned in each sequence.

    Returns:
        out like q with value_dim, with return_lse (out, lse): lse float32 (heads_q, total_q), padded (batch, heads_q, seqlen_q).
        Rows outside every sequence have out 0 and lse −inf, and whatever k and v hold there never counts.

    Raises:
        TypeError, ValueError, NotImplementedError: as in `attention`.
    """
    longest_q, longest_k = length_bound("max_seqlen_q", max_seqlen_q), length_bound("max_seqlen_k", max_seqlen_k)
    given: Any = (q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    tensors = tuple([t for t in given if t is not None])
    options_ = (mask, scale, type(scale), softcap, type(softcap), return_lse, deterministic, backend, longest_q, longest_k)
    said = recall.saying("varlen", *options_, *[t is None for t in given])
    path = recall.find(said, tensors)
    if path is not None:
        return path(*tensors)
    check_tensors(q=q, k=k, v=v)
    arguments = Arguments(
        q,
        k,
        v,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        deterministic=deterministic,
        backend=backend,
        **options(mask, scale, softcap),
    )
    result = run(arguments, return_lse)
    recall.remember(said, tensors, arguments, return_lse, DifferentiablePath.of)
    return result


def length_bound(name: str, value: Any) -> int | None:
    """A longest length as an int. A tensor would have to be read back from the device: the total number of rows bounds it instead.

    Raises:
        TypeError: neither; the message names it.
    """
    if value is None or isinstance(value, Tensor):
        return None
    try:
        return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)  # type: ignore[return-value]
    except TypeError:
        raise TypeError(f"{name} must be an int, a tensor or None, got {value!r} of type {type(value).__name__}") from None


def explain(q: Tensor | Problem, k: Tensor | None = None, v: Tensor | None = None, **keywords: Any) -> Explanation:
    """Which backend would run this call, and why the others would not. Nothing runs; meta and fake tensors will do.

    Args:
        q, k, v: tensors, as for the attention functions, or a Problem alone.
        keywords: those of `attention` and `attention_varlen`. For a cache: seqused_k, its lengths, with page_table, batch_index, leftpad.

    Returns:
        An Explanation; print it.

    Raises:
        TypeError, ValueError: as in `attention`.
    """
    backend = keywords.pop("backend", None)
    if isinstance(q, Problem):
        if k is not None or v is not None or keywords:
            raise TypeError(f"explain(problem) takes only backend=…, got k={k!r}, v={v!r} and {', '.join(keywords) or 'no keywords'}")
        return dispatch.explain(q, backend)
    check_tensors(q=q, k=k, v=v)
    for name in ("page_table", "batch_index", "leftpad"):
        if keywords.get(name) is not None and keywords.get("seqused_k") is None:
            raise ValueError(f"{name} needs seqused_k, the lengths of the cache's sequences")
    lse = keywords.pop("return_lse", False)
    chosen = options(keywords.pop("mask", None), keywords.pop("scale", None), keywords.pop("softcap", 0.0))
    for name in ("max_seqlen_q", "max_seqlen_k"):
        keywords[name] = length_bound(name, keywords.get(name))
    arguments = Arguments(q, k, v, backend=backend, **chosen, **keywords)  # type: ignore[arg-type]
    arguments.check_types()
    return dispatch.explain(Problem.of(arguments.request(lse=lse), describe), backend)
