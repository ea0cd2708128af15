"""Eager calls like an earlier one go straight to their backend: without description, validation, dispatch or operator.

A path is kept under what the caller said, behind a guard, one of torch's own that Dynamo uses. A guard compares every
tensor's type, dtype, device, sizes, strides, requires_grad and dispatch keys with those of the call that was remembered, in a third of a
microsecond. The thread's state is in the keys: under autocast, inference mode, a transform of torch.func, jit.trace or a dispatch mode
(fake tensors, export) a call does not match one that was made without. So whatever `Problem.of` looks at is the same, and nothing watches.
Values (lengths, page tables) are no metadata: where they are to be checked, no path is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_function_stack
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from ... import dispatch
from ...problem import Request, Task
from ...sequences import SequenceKind
from ...settings import current, deciding
from . import operators, plans
from .operators import Arguments

MOST_SAID, MOST_SHAPES, MOST_PATHS = 256, 4096, 4
"""How many different options are remembered, shapes for each of them, and paths for each shape (other strides, types, devices). A program
with ever new ones must not grow without end."""
CHECKED_FOR_FREE = ("cpu",)
"""Where lengths are checked at every call."""

Said = tuple[Any, ...] | None
Result = Tensor | tuple[Tensor, Tensor]
Path = Callable[..., Result]
"""What finishes a call: takes its tensors, returns what the public function does."""
GradientPath = Callable[[Tensor, Tensor | None, Tensor, Tensor, Sequence[Tensor], bool], list[Tensor]]
"""(d_out, d_lse, out, lse, the call's tensors, whether the sink's is wanted) → gradients of q, k, v, and the sink's if it is wanted."""
Allocate = Callable[[], Tensor]
Guard = Callable[..., bool]
"""Whether a call's tensors are like those of the one that was remembered."""
Shapes = tuple[torch.Size, torch.Size]


@dataclass
class Calls:
    """The paths of calls that said the same. The last one is tried first: layers alike follow each other."""

    last: tuple[Guard, Path]  # one object, so that no thread sees a guard beside another's path
    by_shape: dict[Shapes, list[tuple[Guard, Path]]]  # of q and k


_calls: dict[tuple[Any, ...], Calls] = {}


def saying(*said: Any) -> Said:
    """Under what a call is kept: what the caller said besides tensors, with the types of numbers: True equals 1.0, but is no scale. Another
    setting, registry or dispatcher is another call. While a program is traced: nowhere."""
    if torch.compiler.is_dynamo_compiling():
        return None
    return (*said, is_grad_enabled(), deciding(), dispatch.choose, len(dispatch.BACKENDS))


def find(said: Said, tensors: tuple[Tensor, ...]) -> Path | None:
    """The path of an earlier call like this one. `tensors` are all that are given, in the order of `Arguments`."""
    try:
        calls = None if said is None else _calls.get(said)
    except TypeError:  # what cannot be hashed is no option: the checks will refuse it by name
        return None
    if calls is None or _len_torch_function_stack() or forward_ad._current_level >= 0:
        return None
    guard, path = calls.last
    if guard(*tensors):
        return path
    try:
        others = calls.by_shape.get((tensors[0].shape, tensors[1].shape), ())
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or none with a shape that can be hashed
        return None
    for guard, path in others:
        if guard(*tensors):
            calls.last = guard, path
            return path
    return None


def remember(
    said: Said, tensors: tuple[Tensor, ...], a: Arguments, return_lse: bool, differentiate: Callable[..., Path] | None = None
) -> None:
    """Keep the path of a call that has passed every check, if it needs no copy on the way and no values are to be checked.

    `differentiate(forward, a, return_lse)` makes the path of a call that wants a gradient, from one that gives out and lse.
    """
    if said is None or not operators.unwatched(a.q, a.k, a.v) or any(t.stride(-1) != 1 for t in (a.q, a.k, a.v)):
        return
    calls = _calls.get(said)
    paths = [] if calls is None else calls.by_shape.get((a.q.shape, a.k.shape), [])
    wants_gradient = is_grad_enabled() and any(t.requires_grad for t in tensors)
    guard = _guard(tensors)
    if guard is None or (wants_gradient and differentiate is None) or any(path is _refused for _, path in paths):
        return
    path = _forward(a, return_lse or wants_gradient)
    if path is None:
        guard, path = _nothing, _refused
    elif wants_gradient and differentiate is not None:
        path = differentiate(path, a, return_lse)
    if calls is None:
        if len(_calls) >= MOST_SAID:
            _calls.clear()
        calls = _calls[said] = Calls((guard, path), {})
    elif path is not _refused:
        calls.last = guard, path
    if len(calls.by_shape) >= MOST_SHAPES:
        calls.by_shape.clear()
    calls.by_shape[a.q.shape, a.k.shape] = [(guard, path), *paths[: MOST_PATHS - 1]]


def _nothing(*tensors: Tensor) -> bool:
    """A guard that knows no tensors."""
    return False


def _refused(*tensors: Tensor) -> Result:
    """Stands for the path of calls that have none: nobody asks for it again."""
    raise AssertionError("no guard leads here")


def _guard(tensors: tuple[Tensor, ...]) -> Guard | None:
    """Whether tensors are like these. Torch's guard takes each tensor once: where one is two arguments (k as v, one cu_seqlens for both
    sides), it is to be so again. None: torch's guard does not know its own tensors again (one that requires a gradient, under no_grad).
    """
    place = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    firsts = sorted(place.values())
    once = [tensors[i] for i in firsts]
    sizes, strides = [list(t.shape) for t in once], [list(t.stride()) for t in once]
    check = guards.TensorGuards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    repeats = [(place[id(t)], j) for j, t in enumerate(tensors) if place[id(t)] != j]
    if not check(*once):
        return None
    if not repeats:
        return check  # type: ignore[no-any-return]

    def with_repeats(*others: Tensor) -> bool:
        for i, j in repeats:
            if others[i] is not others[j]:
                return False
        return check(*[others[i] for i in firsts])  # type: ignore[no-any-return]

    return with_repeats


def _forward(a: Arguments, lse: bool) -> Path | None:
    """Allocate and launch; gives out, or out and lse. None: the backend has no way without a Request, or values are to be checked."""
    request, device = a.request(Task.FORWARD, lse), a.q.device
    dense = request.q_sequences.kind is request.k_sequences.kind is SequenceKind.DENSE
    if not dense and (device.type in CHECKED_FOR_FREE or current("check_values")):
        return None
    ready = plans.prepared(a, request)
    launch = None if ready.plan.prepare is None else ready.plan.prepare(request)
    if launch is None:
        return _by_request(ready, request) if dense and a.sink is None else None
    new_out = _allocator(ready.out_shape, ready.out_dtype, device)
    new_lse = None if ready.lse_shape is None else _allocator(ready.lse_shape, torch.float32, device)
    index, current_device = _current(device)
    pick = _picker(a)

    def dense_without_lse(q: Tensor, k: Tensor, v: Tensor) -> Result:
        if current_device() != index:
            return _on(device, dense_without_lse, q, k, v)
        out = new_out()
        launch(q, k, v, out, None, None, None, None)
        return out

    def dense_with_lse(q: Tensor, k: Tensor, v: Tensor) -> Result:
        if current_device() != index:
            return _on(device, dense_with_lse, q, k, v)
        out, lse = new_out(), new_lse()  # type: ignore[misc]
        launch(q, k, v, out, lse, None, None, None)
        return out, lse

    def any_other(*tensors: Tensor) -> Result:
        if current_device() != index:
            return _on(device, any_other, *tensors)
        out, lse = new_out(), None if new_lse is None else new_lse()
        launch(*tensors[:3], out, lse, *pick(tensors))
        return out if lse is None else (out, lse)

    if not dense or a.sink is not None:
        return any_other
    return dense_without_lse if new_lse is None else dense_with_lse


def gradient(a: Arguments) -> GradientPath | None:
    """Allocate and launch the backward of a call; gives out dq, dk, dv, and d_sink if it is wanted. None: the backend has no way without
    a Request.

    Raises:
        NotImplementedError: no backend has the gradient.
    """
    request, device = a.request(Task.BACKWARD, lse=True), a.q.device
    ready = plans.prepared(a, request)
    launch = None if ready.plan.prepare is None else ready.plan.prepare(request)
    if launch is None:
        return None
    new = [_allocator(tuple(t.shape), t.dtype, device) for t in (a.q, a.k, a.v)]
    new_d_sink = None if a.sink is None else _allocator(tuple(a.sink.shape), a.sink.dtype, device)
    index, current_device = _current(device)
    pick = _picker(a)

    def run(
        d_out: Tensor, d_lse: Tensor | None, out: Tensor, lse: Tensor, tensors: Sequence[Tensor], wants_sink: bool
    ) -> list[Tensor]:  # fmt: skip
        if current_device() != index:
            with torch.cuda.device(device):
                return run(d_out, d_lse, out, lse, tensors, wants_sink)
        grads = [allocate() for allocate in new]
        d_sink = new_d_sink() if wants_sink and new_d_sink is not None else None
        sink, *arrays = pick(tuple(tensors))
        launch(*tensors[:3], out, d_out, lse, d_lse, sink, *grads, d_sink, *arrays)
        return grads if d_sink is None else [*grads, d_sink]

    return run


def _current(device: torch.device) -> tuple[int | None, Callable[[], int | None]]:
    """A device's index, and what to ask which one is current."""
    return (device.index, torch._C._cuda_getDevice) if device.type == "cuda" else (None, _no_device)


def _no_device() -> None:
    """Stands where a GPU's index is asked for."""


def _on(device: torch.device, path: Path, *tensors: Tensor) -> Result:
    with torch.cuda.device(device):
        return path(*tensors)


def _by_request(ready: plans.Prepared, request: Request) -> Path:
    """Of a dense call. The fields but for the tensors, which belong to one call each, are filled in at once."""
    fields = {name: value for name, value in request.__dict__.items() if name not in ("q", "k", "v")}

    def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
        again = object.__new__(Request)
        again.__dict__.update(fields, q=q, k=k, v=v)
        out, lse = ready.run(again)
        return out if lse is None else (out, lse)

    return run


def _picker(a: Arguments) -> Callable[[tuple[Tensor, ...]], tuple[Any, ...]]:
    """From the tensors of a call like this one: its sink, q_arrays and k_arrays."""
    given = [name for name, value in zip(a._fields[: operators.TENSORS], a, strict=False) if value is not None]

    def places(*names: str) -> list[int] | None:
        found = [given.index(n) if n in given else len(given) for n in names]
        return None if min(found) == len(given) else found

    (sink,) = places("sink") or [len(given)]
    q_places = places("cu_seqlens_q", "seqused_q", "", "")
    k_places = places("cu_seqlens_k", "seqused_k", "leftpad", "batch_index")

    def pick(tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        at = (*tensors, None)
        q_arrays = None if q_places is None else tuple([at[i] for i in q_places])
        k_arrays = None if k_places is None else tuple([at[i] for i in k_places])
        return at[sink], q_arrays, k_arrays

    return pick


def _allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Allocate:
    """torch.empty on the current device, for a third of the time: what Inductor's code calls."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    allocate = guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu  # type: ignore[attr-defined]
    return functools.partial(allocate, tuple(shape), tuple(strides), dtype)
