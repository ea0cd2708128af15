"""Tensors as programs really have them: views of other tensors. The values decide, not where they lie."""

import pytest
import torch

import flash3
from flash3 import Mask, reference
from flash3.problem import Request
from tests.conformance.yardsticks import check_gradient, closed_form

MASK = Mask(causal=True, left=40)
SHAPE = {"q": (2, 33, 4, 64), "k": (2, 65, 2, 64), "v": (2, 65, 2, 64)}


def contiguous(x):
    return x.clone()


def heads_first(x):
    """(batch, heads, seqlen, dim) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x):
    """(seqlen, batch, heads, dim) in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def strided_last(x):
    """Every second number of a row."""
    return x.repeat_interleave(2, -1)[..., ::2]


def dim_before_heads(x):
    """The last dimension is not the contiguous one."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def unaligned_start(x):
    """The first number lies one element behind an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def unaligned_rows(x):
    """Rows of dim + 1 numbers: no second row starts at 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def inside_another(x):
    """A window into a larger tensor, NaN around it."""
    around = torch.full([n + 3 for n in x.shape], torch.nan, dtype=x.dtype, device=x.device)
    inner = around[tuple(slice(1, 1 + n) for n in x.shape)]
    inner.copy_(x)
    return inner


def one_head_for_all(x):
    """Heads with stride 0."""
    return x[:, :, :1].expand(x.shape)


def one_row_for_all(x):
    """A batch with stride 0."""
    return x[:1].expand(x.shape)


VIEWS = [contiguous, heads_first, sequence_first, strided_last, dim_before_heads, unaligned_start, unaligned_rows, inside_another,
         one_head_for_all, one_row_for_all]  # fmt: skip


def _values(backend):
    g = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=g, dtype=torch.float64).to(backend.dtype) for name, shape in SHAPE.items()}


def _check(backend, tensors, d_out, d_lse):
    """Gradients arrive at the views; the oracle works on copies of what they show."""
    leaves = [tensors[name].detach().requires_grad_() for name in "qkv"]
    assert [x.stride() for x in leaves] == [tensors[name].stride() for name in "qkv"]
    out, lse = backend.serve(lambda: flash3.attention(*leaves, mask=MASK, return_lse=True, backend=backend.name))
    grads = backend.serve(lambda: torch.autograd.grad([out, lse], leaves, [d_out, d_lse]))
    on_cpu = [x.detach().cpu().contiguous() for x in leaves]
    request = Request(q=on_cpu[0], k=on_cpu[1], v=on_cpu[2], mask=MASK)
    arriving = d_out.detach().cpu().contiguous(), d_lse.detach().cpu().contiguous()
    exact, plain = reference.attention(request), reference.plain(request)
    for name, ours, e, p in zip(("out", "lse"), (out, lse), exact, plain, strict=True):
        reference.check(name, ours.cpu(), e, p)
    exact, plain = reference.gradients(request, *arriving), reference.plain_gradients(request, *arriving)
    closed = _closed(request, *arriving) if backend.dtype == torch.float32 else (None,) * 3
    for name, ours, e, p, c in zip(("dq", "dk", "dv"), grads, exact[:3], plain[:3], closed[:3], strict=True):
        check_gradient(name, ours.cpu(), e, p, c)


def _closed(request, d_out, d_lse):
    rows = [slice(i, i + 1) for i in range(len(request.q))]
    one = lambda i: Request(q=request.q[i], k=request.k[i], v=request.v[i], mask=MASK)  # noqa: E731
    by_row = [closed_form(one(i), d_out[i], d_lse[i]) for i in rows]
    return [torch.cat([r[j] for r in by_row]) for j in range(3)]


def _arriving(backend):
    g = torch.Generator().manual_seed(6)
    b, n, h, d = SHAPE["q"]
    return torch.randn(b, n, h, d, generator=g).to(backend.device, backend.dtype), torch.randn(b, h, n, generator=g).to(backend.device)


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("which", ["q", "k", "v", "all"])
def test_inputs(view, which, backend):
    tensors = {name: x.to(backend.device) for name, x in _values(backend).items()}
    tensors = {name: view(x) if which in (name, "all") else x for name, x in tensors.items()}
    _check(backend, tensors, *_arriving(backend))


@pytest.mark.parametrize("view", VIEWS, ids=lambda f: f.__name__)
def test_arriving_gradients(view, backend):
    tensors = {name: x.to(backend.device) for name, x in _values(backend).items()}
    d_out, d_lse = _arriving(backend)
    d_lse = view(d_lse[..., None]).squeeze(-1) if view is not unaligned_rows else d_lse
    _check(backend, tensors, view(d_out), d_lse)


def test_interleaved_cache(backend):
    """One tensor (pages, heads, page_size, 2·dim) holds K and V, as in vLLM."""
    both = torch.randn(6, 2, 16, 128, generator=torch.Generator().manual_seed(7)).to(backend.device, backend.dtype)
    k, v = both.transpose(1, 2).split(64, -1)
    q = torch.randn(2, 5, 4, 64, generator=torch.Generator().manual_seed(8)).to(backend.device, backend.dtype)
    table = torch.tensor([[4, 0, 3], [1, 5, 2]], dtype=torch.int32, device=backend.device)
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=backend.device)
    cache = flash3.KVCache(k, v, lengths, page_table=table)
    copied = flash3.KVCache(k.contiguous(), v.contiguous(), lengths, page_table=table)
    run = lambda c: backend.serve(lambda: flash3.attention_kvcache(q, c, mask=MASK, return_lse=True, backend=backend.name))  # noqa: E731
    for name, ours, theirs in zip(("out", "lse"), run(cache), run(copied), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda text, name=name: f"{name}: {text}")
    gathered = [x[table.long()].flatten(1, 2)[:1, :40].cpu() for x in (k, v)]
    request = Request(q=q[:1].cpu(), k=gathered[0], v=gathered[1], mask=MASK)
    reference.check("out", run(cache)[0][:1].cpu(), reference.attention(request)[0], reference.plain(request)[0])


def test_packed_qkv(backend):
    """q, k and v are views of one projection."""
    one = torch.randn(2, 33, 3, 4, 64, generator=torch.Generator().manual_seed(9)).to(backend.device, backend.dtype)
    q, k, v = one.unbind(2)
    _check(backend, {"q": q, "k": k, "v": v}, *_arriving(backend))
