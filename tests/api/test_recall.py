"""Calls like an earlier one: the same results by a shorter way, and never for a call that is not alike."""

from __future__ import annotations

import gc
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import flash3
from flash3 import Mask, dispatch
from flash3.backends.base import Refusal, Support
from flash3.backends.cpu.plan import CpuBackend
from flash3.backends.hopper import backward_plan
from flash3.backends.hopper import plan as hopper
from flash3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash3.frameworks.torch import operators, plans, recall
from flash3.problem import Task
from tests.regressions.oracle import int32, random


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_calls", {})
    monkeypatch.setattr(plans, "_plans", {})


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each search, whether it found a path."""
    seen: list[bool] = []
    original = recall.find

    def find(*arguments: Any) -> Any:
        path = original(*arguments)
        seen.append(path is not None)
        return path

    monkeypatch.setattr(recall, "find", find)
    return seen


def _qkv(device: torch.device, n: int = 9) -> list[torch.Tensor]:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return [random(2, n, h, d, dtype=dtype, device=device, seed=d) for h, d in ((4, 16), (2, 16), (2, 24))]


def test_the_second_call_is_the_first(recalled, device):
    q, k, v = _qkv(device)
    for options in ({}, {"return_lse": True}, {"mask": Mask(causal=True), "softcap": 2.0, "scale": 0.3}):
        first = flash3.attention(q, k, v, **options)
        again = flash3.attention(q.clone(), k.clone(), v.clone(), **options)
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (first, again)), strict=True):
            assert torch.equal(a, b)
            assert (a.stride(), a.dtype) == (b.stride(), b.dtype)
    assert recalled == [False, True] * 3


def test_gradients_of_the_second_call(recalled, device):
    q, k, v = (x.requires_grad_() for x in _qkv(device))
    for lse in (False, True):
        found = []
        for _ in range(2):
            result = flash3.attention(q, k, v, mask=Mask(causal=True), return_lse=lse)
            loss = result[0].square().sum() + result[1].sum() if lse else result.square().sum()
            found.append(torch.autograd.grad(loss, (q, k, v)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert recalled == [False, True] * 2


def test_only_wanted_gradients(recalled, device):
    q, k, v = _qkv(device)
    k.requires_grad_()
    for _ in range(2):
        k.grad = None
        flash3.attention(q, k, v).sum().backward()
        assert k.grad is not None
        assert q.grad is None
    assert recalled == [False, True]


def test_second_derivatives_of_the_second_call_are_refused(device):
    q, k, v = (x.requires_grad_() for x in _qkv(device))
    for _ in range(2):
        (dq,) = torch.autograd.grad(flash3.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_a_tensor_changed_in_place_before_its_gradient(device):
    q, k, v = (x.requires_grad_() for x in _qkv(device))
    for _ in range(2):
        out = flash3.attention(q, k, v)
    with torch.no_grad():
        k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("calls", [1, 2])
def test_a_batch_of_arriving_gradients(calls, device):
    """`is_grads_batched`, and so jacobian(vectorize=True): of a first call, and of a remembered one."""
    q, k, v = (x.requires_grad_() for x in _qkv(device))
    for _ in range(calls):
        out, lse = flash3.attention(q, k, v, return_lse=True)
    for result in (out, lse):
        given = torch.stack([torch.ones_like(result), random(*result.shape, dtype=result.dtype, device=device, seed=1)])
        together = torch.autograd.grad(result, (q, k), given, is_grads_batched=True, retain_graph=True)
        for i, one in enumerate(given):
            alone = torch.autograd.grad(result, (q, k), one, retain_graph=True)
            assert all(torch.equal(a[i], b) for a, b in zip(together, alone, strict=True))


class Subclass(torch.Tensor):
    pass


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_other_tensors_are_other_calls(recalled, device):
    q, k, v = _qkv(device)
    flash3.attention(q, k, v)
    swapped = k.transpose(0, 1).contiguous().transpose(0, 1)
    others = [(q, swapped, v), (q.half(), k.half(), v.half()), (q.as_subclass(Subclass), k, v), (q.clone().requires_grad_(), k, v)]
    for other in others:
        flash3.attention(*other)
    with pytest.raises(TypeError, match="one dtype"):
        flash3.attention(q, k.half(), v)
    with pytest.raises(TypeError, match=r"v must be a torch\.Tensor"):
        flash3.attention(q, k, [1])
    with pytest.raises(ValueError, match="all but the last dimension"):
        flash3.attention(q, k, v[:1])
    if device.type == "cuda":
        with pytest.raises(ValueError, match="one device"):
            flash3.attention(q, k.cpu(), v)
    assert not any(recalled)


@pytest.mark.parametrize("wrong", [[1], None, "q", 3.0], ids=repr)
def test_what_is_no_tensor_after_a_good_call(wrong, device):
    good = _qkv(device)
    flash3.attention(*good)
    for i, name in enumerate("qkv"):
        with pytest.raises(TypeError, match=f"{name} must be a torch"):
            flash3.attention(*good[:i], wrong, *good[i + 1 :])


def test_shapes_in_turn(recalled, device):
    """One said the same of several shapes: each has its path."""
    several = [_qkv(device, n=n) for n in (3, 9, 5)]
    wanted = [flash3.attention(*x) for x in several]
    for _ in range(2):
        for x, y in zip(several, wanted, strict=True):
            assert torch.equal(flash3.attention(*x), y)
    assert recalled == [False] * 3 + [True] * 6


def test_one_tensor_as_two_arguments(recalled, device):
    x = _qkv(device)[0]
    for tensors in ((x, x, x), (x, x.clone(), x), (x, x.clone(), x.clone())):
        wanted = flash3.attention(tensors[0].clone(), tensors[1].clone(), tensors[2].clone())
        for _ in range(2):
            assert torch.equal(flash3.attention(*tensors), wanted)
        flash3.attention(x, x, x.transpose(0, 1).contiguous().transpose(0, 1))
    assert recalled == [False, False, True, False, True, False, True, True, True, True, True, True]


def test_where_something_watches(recalled, device):
    """A mode, a transform, a trace, fake tensors, a tangent: each sees an operator."""
    q, k, v = _qkv(device)
    flash3.attention(q, k, v)
    with Functions():
        flash3.attention(q, k, v)
    with Dispatches():
        flash3.attention(q, k, v)
    torch.func.vmap(lambda x: flash3.attention(x, k, v))(torch.stack([q, q]))
    torch.func.grad(lambda x: flash3.attention(x, k, v).sum())(q)
    torch.jit.trace(lambda x: flash3.attention(x, k, v), (q,), check_trace=False)
    with FakeTensorMode():
        flash3.attention(*(torch.empty(x.shape, device=device) for x in (q, k, v)))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        flash3.attention(forward_ad.make_dual(q, q), k, v)
    assert not any(recalled)


def test_modes_of_a_thread_are_remembered_apart(device):
    q, k, v = _qkv(device)
    for _ in range(2):
        assert not flash3.attention(q, k, v).is_inference()
        with torch.inference_mode():
            assert flash3.attention(q, k, v).is_inference()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            assert flash3.attention(q, k, v).dtype == q.dtype
        with torch.no_grad():
            assert flash3.attention(q.clone().requires_grad_(), k, v).grad_fn is None
        assert flash3.attention(q.clone().requires_grad_(), k, v).grad_fn is not None


def test_settings_are_another_call(recalled, device):
    q, k, v = _qkv(device)
    flash3.attention(q, k, v)
    with flash3.settings.override(backend="nowhere"), pytest.raises(ValueError, match="nowhere"):
        flash3.attention(q, k, v)
    assert not any(recalled)


def test_values_on_the_host_are_checked_each_time(device):
    q, k, v = (x.flatten(0, 1) for x in _qkv(device))
    good, bad = int32(0, 4, 18, device=device), int32(0, 4, 19, device=device)
    with flash3.settings.override(check_values=True):
        for _ in range(2):
            flash3.attention_varlen(q, k, v, good, good, 14, 14)
        with pytest.raises(ValueError, match="cu_seqlens"):
            flash3.attention_varlen(q, k, v, bad, bad, 14, 14)


class Stub(hopper.HopperBackend):
    """The Hopper backend on CPU tensors, its kernels replaced by one that writes down what it got."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        super().__init__(lambda spec, tiles: self.kernel)

    def kernel(self, *arguments: Any) -> None:
        if (arguments[0].data_ptr() | arguments[1].data_ptr() | arguments[2].data_ptr()) % 16:
            raise ValueError("expected data alignment=16 bytes")
        self.calls.append(arguments)

    def support(self, problem: Any) -> Support | Refusal:
        return Support() if problem.spec.task is Task.FORWARD else CpuBackend().support(problem)

    def plan(self, problem: Any, tiles: Any = None) -> Any:
        return super().plan(problem, tiles) if problem.spec.task is Task.FORWARD else CpuBackend().plan(problem)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    backend = Stub()
    module = types.ModuleType("stub_of_this_test")
    vars(module)["Stub"] = lambda: backend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(dispatch, "BACKENDS", {"stub": f"{module.__name__}:Stub"})
    dispatch.backend_named.cache_clear()
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(hopper, "_counters", {0: {0: torch.zeros(1, dtype=torch.int32)}})
    monkeypatch.setattr(hopper, "packed", lambda numbers: numbers)
    monkeypatch.setattr(recall, "CHECKED_FOR_FREE", ())
    monkeypatch.setattr(operators, "backward_plan", lambda *a: None)
    yield backend
    dispatch.backend_named.cache_clear()


HALF = [random(2, 40, h, 64, dtype=torch.bfloat16, device="cpu", seed=h) for h in (4, 2, 2)]
PACKED = [x.flatten(0, 1) for x in HALF]
SINK, CAUSAL = torch.zeros(4), Mask(causal=True)
STARTS, LENGTHS = int32(0, 30, 80, device="cpu"), int32(7, 40, device="cpu")
CACHE = flash3.KVCache(HALF[1], HALF[2], LENGTHS)
GRADED = [x.clone().requires_grad_() for x in HALF]
CALLS = {
    "attention": lambda: flash3.attention(*HALF, mask=CAUSAL),
    "attention with its LSE": lambda: flash3.attention(*HALF, return_lse=True),
    "attention with a sink": lambda: flash3.attention(*HALF, sink=SINK),
    "attention with a gradient": lambda: flash3.attention(*GRADED),
    "attention_varlen": lambda: flash3.attention_varlen(*PACKED, STARTS, STARTS, 50, 50),
    "attention_kvcache": lambda: flash3.attention_kvcache(HALF[0], CACHE),
    "flash_attn_func": lambda: flash_attn_func(*HALF, causal=True),
    "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*PACKED, STARTS, STARTS, 50, 50),
    "flash_attn_with_kvcache": lambda: flash_attn_with_kvcache(HALF[0], *HALF[1:], cache_seqlens=LENGTHS),
}
STEPS = {
    "attention": 28,
    "attention with its LSE": 28,
    "attention with a sink": 28,
    "attention with a gradient": 31,
    "attention_varlen": 44,
    "attention_kvcache": 36,
    "flash_attn_func": 38,
    "flash_attn_varlen_func": 55,
    "flash_attn_with_kvcache": 48,
}
"""Calls of Python and C functions that a repeated call may take, the kernel included: host time, as far as it can be counted."""


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
    return len(a) == len(b) and all(map(_same, a, b)) if isinstance(a, tuple) and isinstance(b, tuple) else bool(a == b)


@pytest.mark.parametrize("name", list(CALLS))
def test_the_kernel_gets_the_same_arguments(name, stub, recalled):
    """In both ways; but for out and lse, which are new each time."""
    first = CALLS[name]()
    again = CALLS[name]()
    assert recalled == [False, True]
    a, b = stub.calls
    assert len(a) == len(b)
    assert all(_same(x, y) for i, (x, y) in enumerate(zip(a, b, strict=True)) if i not in (3, 4))
    for x, y in zip(*(r if isinstance(r, tuple) else (r,) for r in (first, again)), strict=True):
        assert (x.shape, x.stride(), x.dtype, x.requires_grad) == (y.shape, y.stride(), y.dtype, y.requires_grad)
        assert x.data_ptr() != y.data_ptr()


def _steps(call: Any) -> list[str]:
    """The functions of Python and C that a call goes through."""
    steps: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            steps.append(frame.f_code.co_name)
        elif event == "c_call":
            steps.append(argument.__name__)

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


@pytest.mark.parametrize("name", list(CALLS))
def test_steps_of_a_repeated_call(name, stub):
    CALLS[name]()
    steps = _steps(CALLS[name])
    assert len(steps) <= STEPS[name], steps


def test_a_misaligned_tensor_is_copied_on_the_short_way_too(stub, recalled):
    storage = torch.zeros(HALF[0].numel() + 1, dtype=torch.bfloat16)
    flash3.attention(*HALF)
    flash3.attention(storage[1:].view(HALF[0].shape), *HALF[1:])
    assert recalled == [False, True]
    assert stub.calls[1][0].data_ptr() != storage.data_ptr() + 2
    assert stub.calls[1][1] is HALF[1]


def test_what_a_kernel_refuses_otherwise(stub):
    """Is told, not tried again."""

    def refuses(*arguments: Any) -> None:
        stub.calls.append(arguments)
        raise ValueError("another reason")

    stub.kernel = refuses
    with pytest.raises(ValueError, match="another reason"):
        flash3.attention(*HALF)
    assert len(stub.calls) == 1


ORIGINAL_PLAN = operators.backward_plan


class GradientStub(Stub):
    """With the Hopper backend's backward too."""

    def support(self, problem: Any) -> Support | Refusal:
        return Support()

    def plan(self, problem: Any, tiles: Any = None) -> Any:
        return hopper.HopperBackend.plan(self, problem, tiles)


@pytest.fixture
def gradient_stub(stub, monkeypatch: pytest.MonkeyPatch) -> Stub:
    backend = GradientStub()
    vars(sys.modules["stub_of_this_test"])["Stub"] = lambda: backend
    dispatch.backend_named.cache_clear()
    monkeypatch.setattr(backward_plan, "packed", lambda numbers: numbers)
    monkeypatch.setattr(operators, "backward_plan", ORIGINAL_PLAN)
    return backend


def _gradients_of(name: str) -> Any:
    """A function without arguments: the gradients of a call, all of it with fixed tensors."""
    dense, packed = ([x.detach().requires_grad_() for x in tensors] for tensors in (HALF, PACKED))
    sink = SINK.clone().requires_grad_()
    wanted, call = {
        "dense": (dense, lambda: flash3.attention(*dense, mask=CAUSAL)),
        "keys alone": (dense[1:2], lambda: flash3.attention(dense[0].detach(), dense[1], dense[2].detach())),
        "a fixed sink": (dense, lambda: flash3.attention(*dense, sink=SINK)),
        "sink": ([*dense, sink], lambda: flash3.attention(*dense, sink=sink)),
        "lse": (dense, lambda: flash3.attention(*dense, return_lse=True)),
        "packed": (packed, lambda: flash3.attention_varlen(*packed, STARTS, STARTS, 50, 50)),
    }[name]

    def derive() -> tuple[Any, ...]:
        out = call()
        outs = out if isinstance(out, tuple) else (out,)
        return torch.autograd.grad(outs, wanted, [torch.ones_like(x) for x in outs])

    return derive


@pytest.mark.parametrize("name", ["dense", "keys alone", "a fixed sink", "sink", "lse", "packed"])
def test_the_gradient_comes_by_the_same_arguments(name, gradient_stub, recalled, monkeypatch):
    """By Requests, the first time; by what was decided then, the second and third time; but for tensors that are new each time."""
    derive = _gradients_of(name)
    ways = []
    monkeypatch.setattr(operators, "backward", lambda *a, f=operators.backward: (ways.append("long"), f(*a))[1])
    found = [derive() for _ in range(3)]
    assert recalled == [False, True, True]
    assert ways == ["long"]
    backwards = gradient_stub.calls[1::2]
    assert len({len(call) for call in backwards}) == 1
    new = {3, 4, 5, 6, 8, 9, 10, 11, 12, 13}  # out, d_out, lse, d_lse; gradients and workspace
    for call in backwards[1:]:
        for i, (a, b) in enumerate(zip(backwards[0], call, strict=True)):
            if i in new and a is not None:
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            else:
                assert _same(a, b)
    for grads in found[1:]:
        assert [(g.shape, g.stride(), g.dtype) for g in grads] == [(g.shape, g.stride(), g.dtype) for g in found[0]]


def test_a_gradient_after_another_setting(gradient_stub):
    """What decides about the backend is looked at when the gradient is taken."""
    dense = [x.detach().requires_grad_() for x in HALF]
    flash3.attention(*dense)
    out = flash3.attention(*dense)
    torch.autograd.grad(out.sum(), dense, retain_graph=True)
    calls = len(gradient_stub.calls)
    with flash3.settings.override(backend="nobody"), pytest.raises(ValueError, match="nobody"):
        torch.autograd.grad(out.sum(), dense)
    assert len(gradient_stub.calls) == calls


def test_saved_tensors_that_a_hook_has_laid_out_anew(gradient_stub):
    """A kernel reads rows of contiguous columns: anything else is copied, not read as if."""
    kernel = gradient_stub.kernel

    def apart(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, torch.full_like(x, 7)], -1).flatten(-2)[..., ::2] if x.dtype == torch.bfloat16 else x

    def strict(*arguments: Any) -> None:
        if any(t.stride(-1) != 1 for t in arguments[:5]):
            raise ValueError("expected a stride of 1")
        kernel(*arguments)

    gradient_stub.kernel = strict
    dense = [x.detach().requires_grad_() for x in HALF]
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, apart):
            out = flash3.attention(*dense)
        torch.autograd.grad(out.sum(), dense)
        assert all(torch.equal(a, b) for a, b in zip(gradient_stub.calls[-1][:3], HALF, strict=True))


def test_no_tensor_is_kept(gradient_stub):
    dense = [x.clone().requires_grad_() for x in HALF]
    for _ in range(2):
        out = flash3.attention(*dense)
        torch.autograd.grad(out.sum(), dense)
    kept = [weakref.ref(x) for x in (*dense, out)]
    gradient_stub.calls.clear()
    del dense, out
    gc.collect()
    assert [ref() for ref in kept] == [None] * 4


@pytest.mark.parametrize("calls", [1, 2])
def test_a_gradient_in_another_thread_has_the_backend_of_its_forward(calls, gradient_stub, monkeypatch):
    """As autograd's threads on a GPU, to which an override of the caller's thread does not reach."""
    dense, asked = [x.detach().requires_grad_() for x in HALF], []
    with flash3.settings.override(backend="stub"):
        for _ in range(calls):
            out = flash3.attention(*dense)
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda problem, backend=None: (asked.append(backend), choose(problem, backend))[1])
    thread = threading.Thread(target=torch.autograd.grad, args=(out.sum(), dense))
    thread.start()
    thread.join()
    assert asked == ["stub"]


def test_steps_of_a_repeated_gradient(gradient_stub):
    dense = [x.detach().requires_grad_() for x in HALF]
    for _ in range(2):
        out = flash3.attention(*dense)
        torch.autograd.grad(out, dense, torch.ones_like(out), retain_graph=True)
    given = torch.ones_like(out)
    steps = _steps(lambda: torch.autograd.grad(out, dense, given))
    begin = steps.index("backward")
    assert len(steps) - begin <= 36, steps[begin:]
