"""The `torch.library` operators: attention, attention_lse, attention_backward, with shape-only fakes.

One flat argument list serves all three (`Arguments`), because an operator's schema knows tensors and plain values only; `request()`
turns it into the Request that the rest of the library speaks. Lengths are SymInt, so that no length recompiles a traced program.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...backends.base import Gradients, Saved
from ...mask import FULL, Mask
from ...plan import Plan
from ...problem import Request, Task, check_values
from ...sequences import Dense, Packed, Padded, Paged, Sequences
from ...settings import current, settings
from .describe import DTYPES
from .plans import prepared, undisturbed


class Arguments(NamedTuple):
    """What every attention operator takes, in schema order.

    cu_seqlens_x: packed; seqused_x: used lengths of packed sequences, or without cu_seqlens_x the lengths of padded (page_table:
    paged) ones. Masks travel as their six numbers.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None = None
    qv: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad: Tensor | None = None
    batch_index: Tensor | None = None
    page_table: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    causal: bool = False
    left: int | None = None
    right: int | None = None
    chunk: int | None = None
    q_offset: int | None = None
    k_offset: int = 0
    deterministic: bool = False
    out_dtype: torch.dtype | None = None
    backend: str | None = None

    def request(self, task: Task = Task.FORWARD, lse: bool = False) -> Request:
        """The same call in the library's own words."""
        mask = Mask(causal=self.causal, left=self.left, right=self.right, chunk=self.chunk, q_offset=self.q_offset, k_offset=self.k_offset)
        return Request(
            q=rows(self.q),
            k=rows(self.k),
            v=rows(self.v),
            q_sequences=self._queries(),
            k_sequences=self._keys(),
            mask=mask,
            scale=self.scale,
            softcap=self.softcap,
            sink=self.sink,
            qv=None if self.qv is None else rows(self.qv),
            q_scale=self.q_scale,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            lse=lse,
            deterministic=self.deterministic,
            out_dtype=None if self.out_dtype is None else DTYPES[self.out_dtype],
            task=task,
        )

    def check_types(self) -> None:
        """Each tensor is one, with strides, and the backend a name.

        Raises:
            TypeError: one is not; the message names it.
        """
        if self.backend is not None and not isinstance(self.backend, str):
            raise TypeError(f"backend must be a name or None, got {self.backend!r} of type {type(self.backend).__name__}")
        for i, value in enumerate(self[:TENSORS]):
            if value is not None and not isinstance(value, Tensor):
                raise TypeError(f"{self._fields[i]} must be a torch.Tensor, got {type(value).__name__}: {value!r}")
            if value is not None and (value.layout is not torch.strided or value.is_nested):
                kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
                raise TypeError(f"{self._fields[i]} must be a tensor with strides, got a {kind} one")

    def with_backend(self) -> Arguments:
        """With the backend that the settings name here, if the call names none: a gradient may be taken in one of autograd's own threads,
        where an override of this thread does not reach."""
        return self if self.backend is not None else self._replace(backend=current("backend"))

    def _queries(self) -> Sequences:
        if self.cu_seqlens_q is not None:
            return Packed(cu_seqlens=self.cu_seqlens_q, max_length=self.max_seqlen_q, used=self.seqused_q)
        return Dense() if self.seqused_q is None else Padded(lengths=self.seqused_q)

    def _keys(self) -> Sequences:
        if self.page_table is not None:
            return Paged(page_table=self.page_table, lengths=self.seqused_k, leftpad=self.leftpad, batch_index=self.batch_index)
        if self.cu_seqlens_k is not None:
            return Packed(cu_seqlens=self.cu_seqlens_k, max_length=self.max_seqlen_k, used=self.seqused_k)
        if self.seqused_k is not None:
            return Padded(lengths=self.seqused_k, leftpad=self.leftpad, batch_index=self.batch_index)
        return Dense()


TENSORS = Arguments._fields.index("max_seqlen_q")
"""How many fields hold tensors: the first ones."""


def mask_numbers(mask: Mask | None) -> dict[str, Any]:
    """A mask as the fields of Arguments."""
    m = FULL if mask is None else mask
    return {"causal": m.causal, "left": m.left, "right": m.right, "chunk": m.chunk, "q_offset": m.q_offset, "k_offset": m.k_offset}


def rows(t: Tensor) -> Tensor:
    """Kernels read rows of contiguous elements; anything else is copied once."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


def forward(arguments: Arguments, lse: bool) -> tuple[Tensor, Tensor | None]:
    """What the operators do, without the operators. Values are checked where reading them is free, or in checking mode."""
    request = arguments.request(lse=lse)
    ready = prepared(arguments, request)
    if request.q.device.type == "cpu" or settings.check_values:
        check_values(request)
    return ready.run(request)


def backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *flat: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Likewise, of attention_backward: dq, dk, dv, d_sink."""
    arguments = Arguments(*flat)
    request = arguments.request(Task.BACKWARD, lse=True)
    plan = backward_plan(arguments, request)
    dq, dk, dv, d_sink = _gradients_like(arguments, needs)
    wanted = [g if need else None for g, need in zip((dq, dk, dv, d_sink), needs, strict=True)]
    gradients = Gradients(d_out=rows(d_out), d_lse=d_lse, dq=wanted[0], dk=wanted[1], dv=wanted[2], d_sink=wanted[3])
    with undisturbed(request.q.device):
        plan.run(request, Saved(out=out, lse=lse), gradients)
    return dq, dk, dv, d_sink


def backward_plan(arguments: Arguments, request: Request | None = None) -> Plan:
    """The plan of the gradient.

    Raises:
        NotImplementedError: no backend has it.
    """
    return prepared(arguments, request or arguments.request(Task.BACKWARD, lse=True)).plan


def unwatched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call may leave the operators out: nothing traces, and no mode, subclass or transform wants to see them."""
    return (
        type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and not q.is_meta
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def plain(*grads: Tensor | None) -> bool:
    """Whether gradients that came are what they seem to be: no subclass, and no batch of many (`is_grads_batched`, which torch makes by
    the vmap it had before torch.func)."""
    for grad in grads:  # noqa: SIM110 (a generator costs more than the rest)
        if grad is not None and (type(grad) is not Tensor or torch._C._functorch.is_legacy_batchedtensor(grad)):
            return False
    return True


def _attention(*flat: Any) -> Tensor:
    return forward(Arguments(*flat), lse=False)[0]


def _attention_lse(*flat: Any) -> tuple[Tensor, Tensor]:
    out, lse = forward(Arguments(*flat), lse=True)
    assert lse is not None
    return out, lse


def _gradients_like(a: Arguments, needs: list[bool]) -> tuple[Tensor, ...]:
    """Outputs of the backward: one for each of q, k, v, sink; empty where no gradient is wanted (a schema has fixed arity)."""
    inputs = (a.q, a.k, a.v, a.sink)
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device=t.device) if need and t is not None else a.q.new_empty(0)
        for t, need in zip(inputs, needs, strict=True)
    )


def _fake_attention_lse(*flat: Any) -> tuple[Tensor, Tensor]:
    a = Arguments(*flat)
    float8 = a.q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    dtype = a.out_dtype or (torch.bfloat16 if float8 else a.q.dtype)
    out = a.q.new_empty((*a.q.shape[:-1], a.v.shape[-1]), dtype=dtype)
    *batch, rows, heads = a.q.shape[:-1]
    return out, a.q.new_empty((*batch, heads, rows), dtype=torch.float32)


def _fake_attention(*flat: Any) -> Tensor:
    return _fake_attention_lse(*flat)[0]


def _fake_attention_backward(
    d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, needs: list[bool], *flat: Any
) -> tuple[Tensor, ...]:
    return _gradients_like(Arguments(*flat), needs)


_TYPES = {
    "q": "Tensor", "k": "Tensor", "v": "Tensor", "scale": "float?", "softcap": "float", "causal": "bool", "k_offset": "SymInt",
    "deterministic": "bool", "out_dtype": "ScalarType?", "backend": "str?",
}  # fmt: skip
_LENGTHS = ("max_seqlen_q", "max_seqlen_k", "left", "right", "chunk", "q_offset")


def _schema() -> str:
    """The operators' common arguments; optional tensors are `Tensor?`, lengths `SymInt?`."""
    types = {name: _TYPES.get(name, "SymInt?" if name in _LENGTHS else "Tensor?") for name in Arguments._fields}
    return ", ".join(f"{kind} {name}" for name, kind in types.items())


def _define(name: str, schema: str, run: Any, fake: Any) -> Any:
    """Register an operator for every device (`define` and `impl`: half the call time of `custom_op`) and return its overload."""
    torch.library.define(f"flash3::{name}", schema)
    torch.library.impl(f"flash3::{name}", ("cpu", "cuda"), run)
    torch.library.register_fake(f"flash3::{name}", fake)
    overload = getattr(torch.ops.flash3, name).default
    torch.library.impl(f"flash3::{name}", "Autograd", _underived(overload))
    return overload


def _underived(overload: Any) -> Any:
    """The gradient is `functions.Attention`'s. To tensors that want a derivative of the operator alone torch would give 0: such arrive by
    forward mode, and where a transform of torch.func stands in a compiled function (torch.compile then leaves the autograd.Function out).
    """

    def run(*flat: Any) -> Any:
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            raise NotImplementedError(f"{overload} has no gradient by itself, nor under torch.func inside of torch.compile: compile inside")
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError("an argument carries a tangent, but attention has no forward-mode derivative (jvp): use reverse mode")
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*flat)

    return run


attention = _define("attention", f"({_schema()}) -> Tensor", _attention, _fake_attention)
attention_lse = _define("attention_lse", f"({_schema()}) -> (Tensor, Tensor)", _attention_lse, _fake_attention_lse)
attention_backward = _define(
    "attention_backward",
    f"(Tensor d_out, Tensor? d_lse, Tensor out, Tensor lse, bool[] needs, {_schema()}) -> (Tensor, Tensor, Tensor, Tensor)",
    backward,
    _fake_attention_backward,
)
