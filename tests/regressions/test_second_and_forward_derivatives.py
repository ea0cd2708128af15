"""Derivatives that attention does not have are refused. torch's defaults let them vanish: a zero tangent, a gradient without a graph."""

import pytest
import torch
from torch.autograd import forward_ad

import flash3
from flash3 import KVCache
from tests.regressions.oracle import int32, random

CALLS = {
    "out": lambda q, k: flash3.attention(q, k, k),
    "softcap": lambda q, k: flash3.attention(q, k, k, softcap=5.0),
    "lse": lambda q, k: flash3.attention(q, k, k, return_lse=True)[1],
}


def _tensors(device):
    return random(1, 5, 4, 16, dtype=torch.float32, device=device), random(1, 7, 2, 16, dtype=torch.float32, device=device)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_forward_mode(call, device):
    """jvp came out as 0."""
    q, k = _tensors(device)
    call(q, k)  # a call whose way is remembered is no different
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: call(x, k), (q,), (torch.ones_like(q),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        call(q, forward_ad.make_dual(k, torch.ones_like(k)))


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_inside_of_a_compiled_function(transform, device):
    """There torch.compile leaves the autograd.Function out, and the derivative was 0."""
    q, k = _tensors(device)

    def derivative(q):
        def loss(x):
            return flash3.attention(x, k, k).sum()

        return torch.func.grad(loss)(q) if transform == "grad" else torch.func.jvp(loss, (q,), (torch.ones_like(q),))[1]

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"has no gradient by itself|no forward-mode derivative"):
        torch.compile(derivative, fullgraph=True, backend="aot_eager")(q)


def test_forward_mode_over_a_cache(device):
    q, k = _tensors(device)
    cache = KVCache(k, k, int32(7, device=device))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: flash3.attention_kvcache(x, cache), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_second_derivative(call, device):
    """Where the loss was linear in out, its gradient had no graph: a gradient penalty counted for nothing."""
    q, k = _tensors(device)
    leaf = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(leaf, k).sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        (first.square().sum() + leaf.sum()).backward()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(lambda x: torch.func.grad(lambda y: call(y, k).sum())(x).square().sum())(q)


def test_first_derivatives_of_torch_func(device):
    """These are served: grad, vjp and jacrev, which is vjp under vmap."""
    q, k = _tensors(device)
    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(flash3.attention(leaf, k, k).sum(), leaf)
    assert torch.equal(torch.func.grad(lambda x: flash3.attention(x, k, k).sum())(q), wanted)
    jacobian = torch.func.jacrev(lambda x: flash3.attention(x, k, k).sum((0, 1, 2)))(q)
    torch.testing.assert_close(jacobian.sum(0), wanted)
