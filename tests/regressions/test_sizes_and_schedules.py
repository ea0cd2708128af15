"""Reported failures of other kernels: recompilation, streams, schedules used twice, very large sizes. FA is Dao-AILab/flash-attention.

Of the list of public reports, not here: block masks (rows 19 and 21) and context parallelism (row 32), which flash3 does not have yet.
"""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import flash3
from flash3 import Mask
from flash3.flash_attn_interface import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)
from flash3.problem import Request
from flash3.sequences import Paged
from tests.regressions.oracle import int32, judge, random


def test_longest_length_as_a_tensor_compiles_once(device):
    """Row 26, FA PR#2507: max_seqlen as a 0-dim tensor on the device, several steps: one compilation, and no value is read back."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=counter)
    def step(q, k, starts, longest):
        return flash_attn_varlen_func(q, k, k, starts, starts, longest, longest, causal=True)

    q, k = random(40, 2, 64, device=device), random(40, 1, 64, device=device)
    for lengths in ((40,), (10, 30), (1, 2, 37), (8, 8, 24)):
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        starts = torch.nn.functional.pad(starts, (0, 4 - len(starts)), value=40)  # sequences of length 0 at the end
        longest = torch.tensor(max(lengths), device=device)
        out = step(q, k, starts, longest)
        torch.testing.assert_close(out, flash_attn_varlen_func(q, k, k, starts, starts, max(lengths), max(lengths), causal=True))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_another_stream():
    """Row 27, FA PR#1957: a call inside torch.cuda.stream is ordered on that stream."""
    q = random(4, 2048, 16, 128, device="cuda")
    wanted = flash_attn_func(q, q, q, causal=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(5):
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # q arrives late on this stream: another stream would read zeros
            late.copy_(q)
            out = flash_attn_func(late, late, late, causal=True)
            late.zero_()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_another_gpu():
    """A call on tensors of a GPU that is not the current one, and one on the current one, from the same process."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for dim in (64, 128):
        q = random(2, 300, 4, dim)
        results = []
        for index in (0, 1, 0):
            there = q.to(f"cuda:{index}").requires_grad_()
            out = flash3.attention(there, there, there, mask=Mask(causal=True))
            (grad,) = torch.autograd.grad(out.float().square().sum(), there)
            assert out.device == grad.device == there.device
            results.append((out.cpu(), grad.cpu()))
        assert torch.cuda.current_device() == 0
        for out, grad in results[1:]:
            assert torch.equal(out, results[0][0])
            torch.testing.assert_close(grad, results[0][1], rtol=2e-2, atol=2e-2)


def test_integer_lengths_with_a_page_table(device):
    """Row 28, FA PR#1795: cache_seqlens as an int beside a page table."""
    q, k, v = random(2, 3, 4, 64, device=device), random(8, 16, 2, 64, device=device, seed=1), random(8, 16, 2, 64, device=device, seed=2)
    table = int32(7, 0, 3, 5, 2, 6, device=device).view(2, 3)
    for length in (48, 37, 3, 0):
        out, lse, *_ = flash_attn_with_kvcache(q, k, v, cache_seqlens=length, page_table=table, causal=True, return_softmax_lse=True)
        paged = Paged(page_table=table, lengths=int32(length, length, device=device))
        judge(Request(q=q, k=k, v=v, k_sequences=paged, mask=Mask(causal=True)), out, lse)


def test_scheduler_metadata_of_another_call(device):
    """Row 28, vllm#20301 and sglang#22800: metadata made for another num_splits or batch, with a zero tail, or used twice."""
    q, k = random(3, 1, 8, 64, device=device), random(3, 200, 2, 64, device=device)
    lengths = int32(200, 17, 100, device=device)
    wanted = flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, causal=True)
    right = get_scheduler_metadata(3, 1, 200, 8, 2, 64, lengths, torch.bfloat16, causal=True)
    assert right.dtype == torch.int32
    assert right.dim() == 1
    assert right.numel() <= 1 + 4 * 4  # what serving engines set aside for a batch of 3: 1 + 4·round_up(3, 4)
    foreign = get_scheduler_metadata(64, 1, 9999, 32, 1, 128, lengths.repeat(22)[:64], torch.float16, num_splits=7)
    zero_tail = torch.zeros(17, dtype=torch.int32, device=device)
    zero_tail[: right.numel()] = right
    for metadata in (right, right, foreign, zero_tail, zero_tail):
        for splits in (0, 1, 3):
            out = flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, causal=True, scheduler_metadata=metadata, num_splits=splits)
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("k_len", [1 << 20, pytest.param(1 << 22, marks=pytest.mark.slow)])
def test_millions_of_keys(device, k_len):
    """Row 29, FA PR#2662: causal, s_q 2048, s_k 4194304, 8/1 heads d128. (On the CPU s_q 4 and d16, with 2²⁰ keys or, slow, 2²².)

    Only the last s_q keys have scores and values other than 0, so that out and LSE are known in closed form.
    """
    if device.type == "cuda":
        q_len, dim = 2048, 128
    else:
        q_len, dim = 4, 16
    q, k = random(1, q_len, 8, dim, device=device), torch.zeros(1, k_len, 1, dim, dtype=torch.bfloat16, device=device)
    k[:, -q_len:] = 1.0
    v = torch.zeros_like(k)
    v[:, -q_len:, :, 0] = 1.0
    q = q.abs() * 4
    out, lse = flash_attn_func(q, k, v, softmax_scale=1.0, causal=True, return_attn_probs=True)
    score = q.float().sum(-1)[0].T.double().cpu()  # of the last q_len keys; all others have 0
    rows = torch.arange(q_len, dtype=torch.float64)
    old, new = torch.tensor(k_len - q_len, dtype=torch.float64).log(), score + (rows + 1).log()
    exact = torch.logaddexp(old, new)
    torch.testing.assert_close(lse[0].double().cpu(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out[0, :, :, 0].T.double().cpu(), (new - exact).exp(), rtol=1e-2, atol=1e-3)
    window, _ = flash_attn_func(q, k, v, softmax_scale=0.0, window_size=(0, 0), return_attn_probs=True)
    assert (window[..., 0] == 1).all()  # its own key alone, at the far end


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    """Tensors of 2³¹ elements and more: addresses have 64 bits, forward and backward. A window keeps the work small; the last rows and the
    first are held against calls of their own."""
    rows, part, window = (1 << 22) + 64, 1000, 200
    q, k, v = (torch.randn(1, rows, 8, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    assert q.numel() > 1 << 31
    mask = Mask(causal=True, left=window)
    out = flash3.attention(q, k, v, mask=mask)
    d_out = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), d_out)

    last = [q[:, -part:], *(t[:, -part - window :] for t in (k, v))]
    own = [t.detach().clone().requires_grad_() for t in last]
    own_out = flash3.attention(*own, mask=mask)
    own_grads = torch.autograd.grad(own_out, own, d_out[:, -part:])
    torch.testing.assert_close(out[:, -part:], own_out, rtol=2e-2, atol=1e-2)
    for whole, alone in zip(grads, own_grads, strict=True):
        torch.testing.assert_close(whole[:, -part:], alone[:, -part:], rtol=2e-2, atol=2e-2)
    first = flash3.attention(*(t[:, :part].detach() for t in (q, k, v)), mask=mask)
    torch.testing.assert_close(out[:, :part], first, rtol=2e-2, atol=1e-2)


def test_batches_beyond_65535(device):
    """Row 29, flashinfer#3125: batch 65536 and more, dense, packed and as a cache: no grid dimension overflows."""
    batch = 65536 + 3
    q, k, v = (random(batch, 1, 1, 64, dtype=torch.float16, device=device, seed=i) for i in range(3))
    assert torch.equal(flash_attn_func(q, k, v), v)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    assert torch.equal(flash_attn_varlen_func(q[:, 0], k[:, 0], v[:, 0], starts, starts, 1, 1), v[:, 0])
    ones = torch.ones(batch, dtype=torch.int32, device=device)
    assert torch.equal(flash3.attention_kvcache(q, flash3.KVCache(k, v, ones)), v)


def test_a_size_beyond_the_limit_is_refused():
    """Row 29, the other half of the rule: what is too large is refused with the limit named. Meta tensors: nothing is allocated."""
    q, k = (torch.empty(1, n, 1, 64, dtype=torch.bfloat16, device="meta") for n in (1, (1 << 28) + 1))
    with pytest.raises(ValueError, match=f"room for {(1 << 28) + 1} tokens; the limit is {1 << 28}"):
        flash3.explain(q, k, k)
