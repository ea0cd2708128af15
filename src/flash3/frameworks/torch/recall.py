"""Eager calls like an earlier one go straight to their backend: without description, validation, dispatch or operator.

A path is kept under what the caller said (shapes and options), behind a guard, one of torch's own that Dynamo uses. A guard compares every
tensor's type, dtype, device, sizes, strides, requires_grad and dispatch keys with those of the call that was remembered, in a third of a
microsecond. The thread's state is in the keys: under autocast, inference mode, a transform of torch.func, jit.trace or a dispatch mode
(fake tensors, export) a call does not match one that was made without. So whatever `Problem.of` looks at is the same, and nothing watches.
Values (lengths, page tables) are no metadata: where they are to be checked, no path is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_function_stack
from torch._C._dynamo import guards
from torch.autograd import forward_ad

from ... import dispatch
from ...problem import Request, Task
from ...sequences import SequenceKind
from ...settings import current
from . import operators, plans
from .operators import Arguments

MOST_KEYS = 4096
MOST_PATHS = 4
"""Of one key: calls of the same shapes and options on tensors of other strides, types, devices."""
CHECKED_FOR_FREE = ("cpu",)
"""Where lengths are checked at every call."""

Key = tuple[Any, ...] | None
Result = Tensor | tuple[Tensor, Tensor]
Path = Callable[..., Result]
"""What finishes a call: takes its tensors, returns what the public function does."""
Allocate = Callable[[], Tensor]


Guard = tuple[Callable[..., bool], list[int], list[tuple[int, int]]]
"""Torch's guard, which takes each tensor once; at which places these stand; and (i, j) where tensor j is tensor i once more (k as v, one
cu_seqlens for both sides)."""

_paths: dict[tuple[Any, ...], tuple[tuple[Guard, Path], ...]] = {}


def key_of(q: Tensor, k: Tensor, *said: Any) -> Key:
    """Under what a call is kept. `said` is everything else that the caller said, with the types of numbers: True equals 1.0, but is no
    scale. None: these are no tensors with a shape, and the checks will say so. Another setting, registry or dispatcher is another key.
    """
    try:
        return (q.shape, k.shape, is_grad_enabled(), current("backend"), dispatch.choose, len(dispatch.BACKENDS), *said)
    except (AttributeError, RuntimeError):
        return None


def keyed(name: str, given: tuple[Tensor | None, ...], *said: Any) -> tuple[Key, tuple[Tensor, ...]]:
    """Where a call with optional tensors is kept, and those that are given. While a program is traced, nowhere."""
    tensors = tuple([t for t in given if t is not None])
    if torch.compiler.is_dynamo_compiling():
        return None, tensors
    return key_of(given[0], given[1], name, *said, current("check_values"), *[t is None for t in given]), tensors  # type: ignore[arg-type]


def find(key: Key, tensors: tuple[Tensor, ...]) -> Path | None:
    """The path of an earlier call like this one. `tensors` are all that are given, in the order of `Arguments`."""
    try:
        paths = None if key is None else _paths.get(key)
    except TypeError:  # what cannot be hashed is no option: the checks will refuse it by name
        return None
    if paths is not None and forward_ad._current_level < 0 and not _len_torch_function_stack():
        for (guard, firsts, repeats), path in paths:
            if not repeats:
                if guard(*tensors):
                    return path
            elif guard(*[tensors[i] for i in firsts]):
                for i, j in repeats:
                    if tensors[i] is not tensors[j]:
                        break
                else:
                    return path
    return None


def remember(
    key: Key, tensors: tuple[Tensor, ...], a: Arguments, return_lse: bool, differentiate: Callable[..., Path] | None = None
) -> None:
    """Keep the path of a call that has passed every check, if it needs no copy on the way and no values are to be checked.

    `differentiate(forward, a, return_lse)` makes the path of a call that wants a gradient, from one that gives out and lse.
    """
    if key is None or not operators.unwatched(a.q, a.k, a.v) or _paths.get(key) == () or any(t.stride(-1) != 1 for t in (a.q, a.k, a.v)):
        return
    wants_gradient = is_grad_enabled() and any(t.requires_grad for t in tensors)
    guard = _guard(tensors)
    if guard is None or (wants_gradient and differentiate is None):
        return
    if len(_paths) >= MOST_KEYS:
        _paths.clear()
    forward = _forward(a, return_lse or wants_gradient)
    if forward is None:
        _paths[key] = ()  # nor ask again
        return
    path = differentiate(forward, a, return_lse) if wants_gradient and differentiate is not None else forward
    _paths[key] = ((guard, path), *_paths.get(key, ())[: MOST_PATHS - 1])


def _guard(tensors: tuple[Tensor, ...]) -> Guard | None:
    """None: it does not know its own tensors again (one that requires a gradient, under no_grad)."""
    place = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    firsts = sorted(place.values())
    once = [tensors[i] for i in firsts]
    sizes, strides = [list(t.shape) for t in once], [list(t.stride()) for t in once]
    check = guards.TensorGuards(*once, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[arg-type]
    repeats = [(place[id(t)], j) for j, t in enumerate(tensors) if place[id(t)] != j]
    return (check, firsts, repeats) if check(*once) else None


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
    index, current_device = device.index, _current_device if device.type == "cuda" else lambda: None
    pick = _picker(a)

    def dense_without_lse(q: Tensor, k: Tensor, v: Tensor) -> Result:
        if current_device() != index:
            return _on(device, dense_without_lse, q, k, v)
        out = new_out()
        launch(q, k, v, out, None, None, None, None)
        return out

    def any_other(*tensors: Tensor) -> Result:
        if current_device() != index:
            return _on(device, any_other, *tensors)
        out, lse = new_out(), None if new_lse is None else new_lse()
        launch(*tensors[:3], out, lse, *pick(tensors))
        return out if lse is None else (out, lse)

    return dense_without_lse if dense and a.sink is None and new_lse is None else any_other


def _current_device() -> int:
    return torch._C._cuda_getDevice()  # torch.cuda.current_device without its look at whether CUDA is up


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
    if given == ["q", "k", "v"]:
        return lambda tensors: (None, None, None)

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
