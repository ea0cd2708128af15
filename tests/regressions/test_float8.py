"""Reported failures of other FP8 kernels. FA is Dao-AILab/flash-attention."""

import pytest
import torch

import flash3
from flash3 import Mask, reference
from flash3.flash_attn_interface import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from flash3.problem import Request
from flash3.sequences import Padded, Paged
from tests.regressions.oracle import int32, judge, random

E4M3 = torch.float8_e4m3fn


def test_left_window_with_rows_past_every_key(device):
    """Row 14, cudnn-frontend PR#1069: FP8, b=3 d128, seq_q [270, 6898, 1785], seq_kv [2022, 0, 540]; rows past kv_len + left: 0 there.

    Aligned at the first token, so that rows lie past the keys. Reported without a number of heads; one here.
    """
    q_lens, k_lens, left = (270, 6898, 1785), (2022, 0, 540), 128
    q, k, v = (random(3, n, 1, 128, dtype=torch.float32, device=device, seed=i).to(E4M3) for i, n in enumerate((6898, 2022, 2022)))
    mask = Mask(left=left, right=0, q_offset=0)
    used = {"seqused_q": int32(*q_lens, device=device), "seqused_k": int32(*k_lens, device=device)}
    out, lse = flash3.attention_varlen(q, k, v, None, None, None, None, mask=mask, return_lse=True, **used)
    assert out.isfinite().all()
    for i, (q_len, k_len) in enumerate(zip(q_lens, k_lens, strict=True)):
        blind = min(q_len, k_len + left if k_len else 0)
        assert (out[i, blind:] == 0).all()
        assert torch.isneginf(lse[i, :, blind:]).all()
        assert (lse[i, :, :blind] > -torch.inf).all()
    layouts = {"q_sequences": Padded(lengths=used["seqused_q"]), "k_sequences": Padded(lengths=used["seqused_k"])}
    judge(Request(q=q, k=k, v=v, mask=mask, **layouts), out, lse)


def test_paged_window(device):
    """Row 20, flashinfer#3578: FP8 Q and KV, window_left 511, page 32, 64/8 heads d128, 257 tokens: returns, and is right."""
    q = random(1, 257, 64, 128, dtype=torch.float32, device=device).to(E4M3)
    k, v = (random(9, 32, 8, 128, dtype=torch.float32, device=device, seed=i).to(E4M3) for i in (1, 2))
    table, lengths = torch.randperm(9, dtype=torch.int32, device=device)[None], int32(257, device=device)
    out, lse, *_ = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=lengths, page_table=table, causal=True, window_size=(511, 0), return_softmax_lse=True
    )
    few = slice(0, 16)  # the oracle looks at two of the eight key heads
    paged = Paged(page_table=table, lengths=lengths)
    mask = Mask(causal=True, left=511)
    judge(Request(q=q[:, :, few], k=k[:, :, :2], v=v[:, :, :2], k_sequences=paged, mask=mask), out[:, :, few], lse[:, few])


def test_error_does_not_grow_with_the_length(device):
    """Row 22, vllm#23813 and FA PR#2250: FP8 forward over tens of thousands of keys: the relative error is flat in length."""
    errors = []
    for length in (512, 32768):
        q, k, v = (random(1, n, 1, 128, dtype=torch.float32, device=device, seed=i).to(E4M3) for i, n in enumerate((16, length, length)))
        out = flash_attn_func(q, k, v).float().cpu()
        exact = reference.attention(Request(q=q.cpu(), k=k.cpu(), v=v.cpu()))[0]
        errors.append(((out - exact).square().mean() / exact.square().mean()).sqrt().item())
    assert errors[1] < 2 * errors[0]
    assert errors[1] < 0.05


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2], ids=str)
def test_no_gradient(device, dtype):
    """Row 23, FA#1711: FP8 inputs with requires_grad: a clear error, until there is an FP8 backward."""
    q = random(1, 8, 1, 64, dtype=torch.float32, device=device).to(dtype)
    tracked = q.clone().requires_grad_()
    starts = int32(0, 8, device=device)
    calls = {
        "q": lambda: flash_attn_func(tracked, q, q),
        "k": lambda: flash_attn_func(q, tracked, q),
        "v": lambda: flash3.attention(q, q, tracked),
        "packed": lambda: flash_attn_varlen_func(tracked[0], q[0], q[0], starts, starts, 8, 8),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match=r"requires_grad: float8_e\dm\d\S* inputs have no gradient.*detach"):
            call()
        with torch.no_grad():
            assert call().dtype == torch.bfloat16
