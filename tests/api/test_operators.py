"""The operators in torch's machinery: opcheck, gradients that cost only what is wanted, func, inference mode, threads, autocast."""

import threading

import pytest
import torch

import flash3
from flash3 import Mask, dispatch
from flash3.frameworks.torch import operators
from flash3.frameworks.torch.operators import Arguments
from tests.regressions.oracle import int32, random

CAUSAL = {"causal": True}


def _qkv(*lead, heads=(4, 2), dims=(16, 24), dtype=torch.float32, device=None):
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    return [random(*lead, *s, dtype=dtype, device=device, seed=i) for i, s in enumerate(shapes)]


def _argument_sets(device):
    dense, packed = _qkv(2, 9, device=device), _qkv(18, device=device)
    starts, used = int32(0, 7, 18, device=device), int32(5, 9, device=device)
    pages = [random(8, 4, 2, d, dtype=torch.float32, device=device, seed=d) for d in (16, 24)]
    table = int32(7, 0, 3, 5, 2, 6, device=device).view(2, 3)
    sink = torch.linspace(-1, 1, 4, device=device)
    return {
        "dense": Arguments(*dense),
        "masked": Arguments(*dense, causal=True, left=4, softcap=2.0, scale=0.3, q_offset=1, k_offset=-2, deterministic=True, backend=None),
        "sink": Arguments(*dense, sink=sink, chunk=4),
        "packed": Arguments(*packed, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=11, max_seqlen_k=11, causal=True),
        "used": Arguments(*dense, seqused_q=used, seqused_k=used, right=2),
        "paged": Arguments(dense[0], *pages, seqused_k=int32(12, 3, device=device), page_table=table, leftpad=int32(2, 0, device=device)),
        "half": Arguments(*_qkv(1, 3, dtype=torch.float16, device=device)),
        "empty": Arguments(*_qkv(0, 3, device=device)),
        "views": Arguments(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in dense)),
    }


SETS = list(_argument_sets(None))


@pytest.mark.parametrize("name", SETS)
def test_opcheck_forward(name, device):
    arguments = tuple(_argument_sets(device)[name])
    torch.library.opcheck(torch.ops.flash3.attention.default, arguments)
    torch.library.opcheck(torch.ops.flash3.attention_lse.default, arguments)


@pytest.mark.parametrize("needs", [[True, True, True, True], [False, True, False, False]], ids=["all", "dk"])
@pytest.mark.parametrize("name", [n for n in SETS if n != "paged"])
def test_opcheck_backward(name, needs, device):
    a = _argument_sets(device)[name]
    needs = [need and x is not None for need, x in zip(needs, (a.q, a.k, a.v, a.sink), strict=True)]
    out, lse = operators.attention_lse(*a)
    for d_lse in (None, torch.ones_like(lse)):
        torch.library.opcheck(torch.ops.flash3.attention_backward.default, (torch.ones_like(out), d_lse, out, lse, needs, *a))


@pytest.mark.parametrize("kind", ["contiguous", "paged", "packed"])
def test_opcheck_append(kind, device):
    k_new, v_new = (random(2, 3, 2, d, dtype=torch.float32, device=device, seed=d) for d in (16, 24))
    rows = (2, 12) if kind != "paged" else (8, 4)
    caches = [torch.zeros(*rows, 2, d, device=device) for d in (16, 24)]
    lengths, index = int32(5, 0, device=device), int32(1, 0, device=device)
    table = int32(7, 0, 3, 5, 2, 6, device=device).view(2, 3) if kind == "paged" else None
    starts = None
    if kind == "packed":
        k_new, v_new, starts = k_new.flatten(0, 1), v_new.flatten(0, 1), int32(0, 4, 6, device=device)
    torch.library.opcheck(torch.ops.flash3.append.default, (*caches, k_new, v_new, lengths, index, table, starts))


@pytest.fixture
def launches(monkeypatch):
    """Every plan that runs, in order: (task, names of the gradients it was asked for)."""
    seen = []
    original = dispatch.choose

    def choose(problem, backend=None):
        plan = original(problem, backend)

        def run(request, *rest):
            grads = rest[1] if problem.spec.task.value == "backward" else None
            wanted = [n for n in ("dq", "dk", "dv", "d_sink") if grads is not None and getattr(grads, n) is not None]
            seen.append((problem.spec.task.value, wanted, problem.spec.lse))
            plan.run(request, *rest)

        return type(plan)(backend=plan.backend, problem=problem, run=run)

    monkeypatch.setattr(dispatch, "choose", choose)
    return seen


@pytest.mark.parametrize("wanted", [("q",), ("k",), ("v",), ("sink",), ("q", "v"), ("q", "k", "v", "sink")], ids=" ".join)
def test_only_wanted_gradients_are_computed(wanted, launches, device):
    leaves = dict(zip("qkv", _qkv(2, 9, device=device), strict=True)) | {"sink": torch.zeros(4, device=device)}
    for name in wanted:
        leaves[name].requires_grad_()
    flash3.attention(**leaves).sum().backward()
    assert launches == [("forward", [], True), ("backward", [{"sink": "d_sink"}.get(n, f"d{n}") for n in wanted], True)]
    assert [n for n, x in leaves.items() if x.grad is not None] == list(wanted)


def test_without_gradient_nothing_is_kept(launches, device):
    """No requires_grad, or no_grad: no autograd node, no LSE, no backward."""
    q, k, v = _qkv(2, 9, device=device)
    assert flash3.attention(q, k, v).grad_fn is None
    q.requires_grad_()
    with torch.no_grad():
        assert flash3.attention(q, k, v).grad_fn is None
    assert flash3.attention(q.detach(), k, v).grad_fn is None
    assert launches == [("forward", [], False)] * 3


def test_outputs_that_get_no_gradient(launches, device):
    """The LSE alone in the loss, out alone, neither: what does not arrive is not invented."""
    q, k, v = (x.requires_grad_() for x in _qkv(2, 9, device=device))
    out, lse = flash3.attention(q, k, v, return_lse=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v), retain_graph=True)
    of_out = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    of_lse = torch.autograd.grad(lse.sum(), (q, k, v))
    for total, a, b in zip(both, of_out, of_lse, strict=True):
        torch.testing.assert_close(total, a + b, rtol=1e-4, atol=1e-5)
    assert (of_lse[2] == 0).all()
    assert len(launches) == 4


def test_second_derivatives_are_refused(device):
    q, k, v = (x.requires_grad_() for x in _qkv(1, 3, device=device))
    (dq,) = torch.autograd.grad(flash3.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


def test_gradcheck():
    """Against finite differences, with everything in it."""
    q, k, v = (x.requires_grad_() for x in _qkv(1, 4, dims=(8, 8), dtype=torch.float64))
    sink = torch.linspace(-1, 1, 4, dtype=torch.float32)
    f = lambda q, k, v: flash3.attention(q, k, v, mask=Mask(causal=True, left=2), softcap=1.5, sink=sink, scale=0.7)  # noqa: E731
    assert torch.autograd.gradcheck(f, (q, k, v), fast_mode=True)


def test_torch_func_grad(device):
    q, k, v = _qkv(2, 9, device=device)
    loss = lambda q, k, v: flash3.attention(q, k, v, mask=Mask(causal=True)).square().sum()  # noqa: E731
    ours = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


def test_checkpointing(device):
    q, k, v = (x.requires_grad_() for x in _qkv(2, 9, device=device))
    f = lambda q, k, v: flash3.attention(q, k, v, mask=Mask(causal=True)).square()  # noqa: E731
    wanted = torch.autograd.grad(f(q, k, v).sum(), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(f, q, k, v, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(again.sum(), (q, k, v)), wanted, strict=True))


def test_inference_mode(device):
    q, k, v = _qkv(2, 9, device=device)
    wanted = flash3.attention(q, k, v, mask=Mask(causal=True), return_lse=True)
    with torch.inference_mode():
        ours = flash3.attention(*(x.clone() for x in (q, k, v)), mask=Mask(causal=True), return_lse=True)
        assert ours[0].is_inference()
        cache = flash3.KVCache(k.clone(), v.clone(), int32(9, 4, device=device))
        assert flash3.attention_kvcache(q, cache, k_new=None).shape == wanted[0].shape
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}], ids=["", "softcap"])
def test_autocast_changes_nothing(options, device):
    """The inputs decide the dtype, not an ambient policy; forward, backward, over a cache and merged."""
    q, k, v = (x.requires_grad_() for x in _qkv(2, 9, device=device))

    def results():
        out, lse = flash3.attention(q, k, v, return_lse=True, mask=Mask(causal=True), **options)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
        with torch.no_grad():
            cached = flash3.attention_kvcache(q, flash3.KVCache(k.clone(), v, int32(9, 4, device=device)), return_lse=True, **options)
            return [out, lse, *grads, flash3.attention(q, k, v, **options), *cached, *flash3.merge([out, out], [lse, lse])]

    wanted = results()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        ours = results()
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


def test_threads(device):
    """Several threads at once, forward and backward, each with its own settings."""
    cases = [(n, Mask(causal=bool(n % 2), left=n)) for n in range(1, 9)]

    def results(n, mask):
        q, k, v = (x.requires_grad_() for x in _qkv(2, 5 * n, device=device))
        out, lse = flash3.attention(q, k, v, mask=mask, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))]

    wanted, found = [results(*case) for case in cases], {}

    def work(i):
        with flash3.settings.override(backend="cpu" if i % 2 and device.type == "cpu" else None):
            for _ in range(5):
                found[i] = results(*cases[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(cases))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i, expected in enumerate(wanted):
        assert all(torch.equal(a, b) for a, b in zip(found[i], expected, strict=True))


def test_a_backward_nobody_can_differentiate_leaves_the_operator_out(monkeypatch, device):
    """Its dispatch and a second autograd.Function cost more than a launch. With create_graph they are there, to refuse the derivative."""
    calls, operator = [], operators.attention_backward
    monkeypatch.setattr(operators, "attention_backward", lambda *flat: calls.append(1) or operator(*flat))
    leaves = [x.requires_grad_() for x in _qkv(2, 9, device=device)]
    gradients = [torch.autograd.grad(flash3.attention(*leaves).sum(), leaves, create_graph=create) for create in (False, True)]
    assert len(calls) == 1
    for short, long in zip(*gradients, strict=True):
        assert torch.equal(short, long)
