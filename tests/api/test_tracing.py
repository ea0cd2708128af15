"""torch.compile, torch.export, fake and meta tensors: shapes without data, one graph, no recompilation for another length."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export

import flash3
from flash3 import Mask, dispatch
from flash3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from tests.regressions.oracle import int32, random

MASKS = [None, Mask(causal=True), Mask(left=3, right=1), Mask(causal=True, chunk=4), Mask(causal=True, q_offset=2, k_offset=-1)]


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def _qkv(n=9, device=None, lead=(2,)):
    return [random(*lead, n, h, d, dtype=torch.float32, device=device, seed=d) for h, d in ((4, 16), (2, 16), (2, 24))]


def _compiled(f):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(f, fullgraph=True, backend=counter), counter


def _same(ours, wanted):
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_compiled_forward_and_backward(mask, where, device):
    """A Mask may be made in the traced function, or be an argument from outside of it."""
    sink = torch.linspace(-1, 1, 4, device=device).requires_grad_()

    def f(q, k, v, mask):
        if where == "inside" and mask is not None:
            mask = Mask(
                causal=mask.causal, left=mask.left, right=mask.right, chunk=mask.chunk, q_offset=mask.q_offset, k_offset=mask.k_offset
            )
        out, lse = flash3.attention(q, k, v, mask=mask, softcap=2.0, sink=sink, return_lse=True)
        return (out * 2).cos().sum() + lse.sum()

    leaves = [*(x.requires_grad_() for x in _qkv(device=device)), sink]
    g, counter = _compiled(f)
    _same(torch.autograd.grad(g(*leaves[:3], mask), leaves), torch.autograd.grad(f(*leaves[:3], mask), leaves))
    assert counter.frame_count == 1


@pytest.mark.parametrize("wanted", [False, True], ids=["out", "lse"])
def test_compiled_backward_has_no_gradient_of_an_lse_that_was_not_returned(wanted, device):
    """AOTAutograd would fill one with zeros: memory, and other kernels than in eager mode."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def f(q, k, v):
        result = flash3.attention(q, k, v, mask=Mask(causal=True), return_lse=wanted)
        return result[0].sum() + result[1].sum() if wanted else result.sum()

    leaves = [x.requires_grad_() for x in _qkv(device=device)]
    torch.compile(f, fullgraph=True, backend=aot_autograd(fw_compiler=keep))(*leaves).backward()
    nodes = [n for graph in graphs for n in graph.graph.nodes if n.target is torch.ops.flash3.attention_backward.default]
    assert [node.args[1] is not None for node in nodes] == [wanted]


def test_one_tensor_as_two_arguments(device):
    """k as v, and self-attention's one cu_seqlens for both sides: Dynamo wants an autograd.Function's arguments to be different tensors."""
    q, k, _ = (x.requires_grad_() for x in _qkv(device=device))
    starts = int32(0, 4, 9, device=device)

    def f(q, k, starts):
        out = flash3.attention_varlen(q[0], k[0], k[0], starts, starts, 5, 5)
        return out.cos().sum() + flash3.attention(q, k, k).sin().sum()

    g, counter = _compiled(f)
    _same(torch.autograd.grad(g(q, k, starts), (q, k)), torch.autograd.grad(f(q, k, starts), (q, k)))
    assert counter.frame_count == 1


def test_compiled_append_of_packed_tokens(device):
    """The checks of what is appended can be traced."""
    q, k, _ = _qkv(4, device=device, lead=())
    caches = [torch.zeros(2, 9, 2, 16, device=device) for _ in range(4)]
    lengths, starts, cos = int32(1, 2, device=device), int32(0, 2, 4, device=device), random(9, 8, dtype=torch.float32, device=device)

    def f(q, k, k_cache, v_cache, first):
        cache, rotary = flash3.KVCache(k_cache, v_cache, lengths), flash3.Rotary(cos, cos, lengths=first)
        return flash3.attention_kvcache(q, cache, k_new=k, v_new=k, rotary=rotary, cu_seqlens_q=starts, max_seqlen_q=2)

    g, _ = _compiled(f)
    first = int32(3, 4, device=device)
    _same((g(q, k, *caches[:2], first), *caches[:2]), (f(q, k, *caches[2:], first), *caches[2:]))


def test_dynamic_lengths_compile_once_more(device):
    """The first length is a constant; the second makes lengths dynamic; no other recompiles. Forward and backward."""

    def f(q, k, v):
        return flash3.attention(q, k, v, mask=Mask(causal=True, left=20), return_lse=True)

    g, counter = _compiled(f)
    for n in (9, 17, 5, 33, 64, 2, 100):
        leaves = [x.requires_grad_() for x in _qkv(n, device)]
        ours, wanted = g(*leaves), f(*leaves)
        _same(ours, wanted)
        _same(torch.autograd.grad(ours[0].sum(), leaves), torch.autograd.grad(wanted[0].sum(), leaves))
    assert counter.frame_count <= 2


def test_packed_lengths_as_ints_compile_once_more(device):
    """max_seqlen changes with every batch: it must be no constant of the program."""

    def f(q, k, v, starts, longest):
        return flash3.attention_varlen(q, k, v, starts, starts, longest, longest, mask=Mask(causal=True))

    g, counter = _compiled(f)
    q, k, v = _qkv(40, device, lead=())
    for cut in (7, 30, 12, 20, 1, 39):
        starts = int32(0, cut, 40, device=device)
        torch.testing.assert_close(g(q, k, v, starts, max(cut, 40 - cut)), f(q, k, v, starts, max(cut, 40 - cut)))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["left", "right", "chunk", "q_offset", "k_offset"])
def test_mask_numbers_compile_once_more(name, device):
    """The steps of a ring and the chunks of a prompt differ in these numbers alone."""

    def f(q, k, v, number):
        return flash3.attention(q, k, v, mask=Mask(causal=True, **{name: number}))

    g, counter = _compiled(f)
    q, k, v = _qkv(device=device)
    for i in range(2, 8):
        torch.testing.assert_close(g(q, k, v, i), f(q, k, v, i))
    assert counter.frame_count <= 2


def test_scale_and_softcap_that_vary(device):
    """An operator's floats are constants of a graph (torch has no symbolic ones there): each value compiles, and is right."""

    def f(q, k, v, scale, softcap):
        return flash3.attention(q, k, v, mask=Mask(causal=True), scale=scale, softcap=softcap)

    g, _ = _compiled(f)
    q, k, v = _qkv(device=device)
    for i in range(3):
        torch.testing.assert_close(g(q, k, v, 0.1 * i, 1.0 + i), f(q, k, v, 0.1 * i, 1.0 + i))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_compiled_decoding(paged, device):
    """Append, rotate, attend, step after step, in one graph; the cache is changed in place."""
    cos, sin = (f(torch.outer(torch.arange(32.0), torch.arange(1, 9) / 8)).to(device) for f in (torch.cos, torch.sin))
    table = int32(7, 0, 3, 5, 2, 6, 1, 4, device=device).view(2, 4) if paged else None
    rows = (8, 8) if paged else (2, 32)

    def step(q, k, v, k_cache, v_cache, lengths):
        cache = flash3.KVCache(k_cache, v_cache, lengths, page_table=table)
        return flash3.attention_kvcache(q, cache, k_new=k, v_new=v, rotary=flash3.Rotary(cos, sin), mask=Mask(causal=True))

    g, counter = _compiled(step)
    ours, theirs = ([torch.zeros(*rows, 2, d, device=device) for d in (16, 24)] for _ in range(2))
    lengths = int32(0, 5, device=device)
    for i in range(6):
        new = [random(2, 1, h, d, dtype=torch.float32, device=device, seed=100 * i + d) for h, d in ((4, 16), (2, 16), (2, 24))]
        torch.testing.assert_close(g(*new, *ours, lengths), step(*new, *theirs, lengths))
        _same(ours, theirs)
        lengths = lengths + 1
    assert counter.frame_count == 1
    assert ours[0].abs().sum() > 0


def test_compiled_flash_attention_3(device):
    """Its own names trace as well."""
    q, k, v = _qkv(device=device)
    starts = int32(0, 9, 18, device=device)

    def f(q, k, v):
        a, lse = flash_attn_func(q, k, v, causal=True, window_size=(4, 0), return_attn_probs=True)
        b = flash_attn_varlen_func(*(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 9, 9, causal=True)
        c = flash_attn_with_kvcache(q, k, v, cache_seqlens=7, causal=True)
        return a, lse, b, c

    g, counter = _compiled(f)
    _same(g(q, k, v), f(q, k, v))
    assert counter.frame_count == 1


class Model(torch.nn.Module):
    def forward(self, q, k, v):
        out, lse = flash3.attention(q, k, v, mask=Mask(causal=True, left=5), return_lse=True)
        return out + 1, lse


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_export(dynamic, device):
    q, k, v = _qkv(12, device)
    shapes = None
    if dynamic:
        batch, length = Dim("batch", min=1, max=64), Dim("length", min=2, max=4096)
        shapes = ({0: batch, 1: length},) * 3
    program = export(Model(), (q, k, v), dynamic_shapes=shapes)
    assert "flash3.attention_lse" in str(program.graph)
    _same(program.module()(q, k, v), Model()(q, k, v))
    if dynamic:
        other = _qkv(31, device, lead=(3,))
        _same(program.module()(*other), Model()(*other))


class Decoder(torch.nn.Module):
    def forward(self, q, k_new, v_new, k, v, lengths):
        return flash3.attention_kvcache(q, flash3.KVCache(k, v, lengths), k_new=k_new, v_new=v_new, mask=Mask(causal=True))


def test_export_of_a_decoder(device):
    caches = [torch.zeros(2, 16, 2, d, device=device) for d in (16, 24)]
    new, lengths = _qkv(1, device), int32(3, 8, device=device)
    program = export(Decoder(), (*new, *caches, lengths))
    mine, wanted = [c.clone() for c in caches], [c.clone() for c in caches]
    torch.testing.assert_close(program.module()(*new, *mine, lengths), Decoder()(*new, *wanted, lengths))
    _same(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fake_tensors(dtype):
    """Shapes and dtypes without data, equal to those of a real call; on CUDA without a GPU too."""
    real = [x[..., :16].to(dtype) for x in _qkv()]
    wanted = flash3.attention(*real, return_lse=True)
    for kind in ("cpu", "cuda"):
        with FakeTensorMode():
            q, k, v = (torch.empty(x.shape, dtype=dtype, device=kind) for x in real)
            ours = flash3.attention(q, k, v, mask=Mask(causal=True), return_lse=True)
            assert flash3.attention(q, k, v).shape == wanted[0].shape
        for a, b in zip(ours, wanted, strict=True):
            assert (a.shape, a.dtype, a.stride(), a.device.type) == (b.shape, b.dtype, b.stride(), kind)


def test_fake_gradients():
    with FakeTensorMode():
        leaves = [torch.empty(2, 9, h, d, requires_grad=True) for h, d in ((4, 16), (2, 16), (2, 24))]
        grads = torch.autograd.grad(flash3.attention(*leaves).sum(), leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]


def test_meta_tensors_compute_shapes():
    q, k, v = (x.to("meta") for x in _qkv())
    out, lse = flash3.attention(q, k, v, return_lse=True)
    assert (out.shape, lse.shape, out.device.type) == ((2, 9, 4, 24), (2, 4, 9), "meta")


def test_explain_of_meta_and_fake_tensors():
    """Nothing runs and nothing is allocated: a hundred gigabytes are fine."""
    q, k = (torch.empty(64, n, h, 128, dtype=torch.bfloat16, device="meta") for n, h in ((1 << 20, 32), (1 << 20, 8)))
    explained = flash3.explain(q, k, k, mask=Mask(causal=True), return_lse=True)
    assert explained.problem.out_shape == (64, 1 << 20, 32, 128)
    assert explained.problem.lse_shape == (64, 32, 1 << 20)
    assert [name for name, _ in explained.answers] == list(dispatch.BACKENDS)
    text = str(explained)
    for said in ("forward, bfloat16 -> bfloat16", "32 query and 8 key heads", "mask causal", "cpu: no, "):
        assert said in text
    with FakeTensorMode():
        fake = torch.empty(2, 9, 4, 64)
        assert flash3.explain(fake, fake, fake).backend == "cpu"
