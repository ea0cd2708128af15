"""Wrong input: a TypeError or ValueError that names the argument, its value and what is allowed, before anything runs."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import flash3
from flash3 import KVCache, Mask, Rotary, dispatch
from flash3.flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from tests.conformance.storage import int32


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Plans that were run: at the end of each test there must be none."""
    ran = []
    original = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *a: replace(original(*a), run=lambda *rest: ran.append(rest)))
    yield ran
    assert not ran


def t(*shape, dtype=torch.float32, **names):
    return torch.zeros(*shape, dtype=dtype, **names)


@dataclass(frozen=True)
class Wrong:
    """A call's arguments that are wrong, the error, and words of its message."""

    arguments: dict[str, Any]
    error: type[Exception]
    says: tuple[str, ...]


DENSE = {"q": t(2, 5, 4, 64), "k": t(2, 7, 2, 64), "v": t(2, 7, 2, 64)}
E4M3 = torch.float8_e4m3fn
ATTENTION = {
    "q of rank 3": Wrong({"q": t(5, 4, 64)}, ValueError, ("q must have 4 dimensions", "(batch, seqlen, heads, dim)", "(5, 4, 64)")),
    "k of rank 5": Wrong({"k": t(1, 2, 7, 2, 64)}, ValueError, ("k must have 4 dimensions", "(1, 2, 7, 2, 64)")),
    "v of rank 2": Wrong({"v": t(7, 64)}, ValueError, ("v must have 4 dimensions", "(7, 64)")),
    "dtypes mixed": Wrong({"k": t(2, 7, 2, 64, dtype=torch.float16)}, TypeError, ("one dtype", "float32", "float16")),
    "integers": Wrong({"q": t(2, 5, 4, 64, dtype=torch.int64)}, TypeError, ("q has dtype int64", "float16, bfloat16")),
    "complex": Wrong({"v": t(2, 7, 2, 64, dtype=torch.complex64)}, TypeError, ("v has dtype complex64",)),
    "bool": Wrong({"k": t(2, 7, 2, 64, dtype=torch.bool)}, TypeError, ("k has dtype bool",)),
    "heads that do not divide": Wrong({"q": t(2, 5, 3, 64)}, ValueError, ("q has 3 heads and k 2", "multiple")),
    "more key heads": Wrong({"q": t(2, 5, 1, 64)}, ValueError, ("q has 1 heads and k 2", "multiple")),
    "no key heads": Wrong({"k": t(2, 7, 0, 64), "v": t(2, 7, 0, 64)}, ValueError, ("q has 4 heads and k 0",)),
    "other v heads": Wrong({"v": t(2, 7, 1, 64)}, ValueError, ("k has 2 heads and v 1", "equal")),
    "other v length": Wrong({"v": t(2, 6, 2, 64)}, ValueError, ("(2, 7, 2, 64)", "(2, 6, 2, 64)")),
    "other batch": Wrong({"q": t(3, 5, 4, 64)}, ValueError, ("batch size 3", "2", "equal")),
    "other k width": Wrong({"k": t(2, 7, 2, 32)}, ValueError, ("head_dim 64", "32", "equal")),
    "head_dim 60": Wrong({"q": t(2, 5, 4, 60), "k": t(2, 7, 2, 60)}, ValueError, ("head_dim", "multiple of 8 from 8 to 256", "60")),
    "head_dim 264": Wrong({"q": t(2, 5, 4, 264), "k": t(2, 7, 2, 264)}, ValueError, ("head_dim", "from 8 to 256", "264")),
    "head_dim 0": Wrong({"q": t(2, 5, 4, 0), "k": t(2, 7, 2, 0)}, ValueError, ("head_dim", "from 8 to 256", "got 0")),
    "value_dim 36": Wrong({"v": t(2, 7, 2, 36)}, ValueError, ("value_dim", "multiple of 8", "36")),
    "head_dim 24 in FP8": Wrong(
        {n: t(2, 5, 2, 24).to(E4M3) for n in "qkv"}, ValueError, ("head_dim", "multiple of 16 from 16 to 256", "float8_e4m3fn", "24")
    ),
    "q no tensor": Wrong({"q": [[1.0]]}, TypeError, ("q must be a torch.Tensor", "list")),
    "k no tensor": Wrong({"k": None}, TypeError, ("k must be a torch.Tensor", "NoneType")),
    "q sparse": Wrong({"q": t(2, 5, 4, 64).to_sparse()}, TypeError, ("q must be a tensor with strides", "sparse_coo")),
    "k nested": Wrong({"k": torch.nested.nested_tensor([*t(2, 7, 2, 64)])}, TypeError, ("k must be a tensor with strides", "nested")),
    "mask a float tensor": Wrong({"mask": t(5, 7)}, TypeError, ("mask must be a flash3.Mask", "Tensor", "Mask(causal=")),
    "mask a bool tensor": Wrong({"mask": t(5, 7, dtype=torch.bool)}, TypeError, ("mask must be a flash3.Mask",)),
    "mask a word": Wrong({"mask": "causal"}, TypeError, ("mask must be a flash3.Mask", "str")),
    "scale NaN": Wrong({"scale": float("nan")}, ValueError, ("scale must be finite", "nan")),
    "scale infinite": Wrong({"scale": float("inf")}, ValueError, ("scale must be finite", "inf")),
    "scale a word": Wrong({"scale": "0.1"}, TypeError, ("scale must be a number", "'0.1'")),
    "scale a tensor": Wrong({"scale": torch.tensor(0.5)}, TypeError, ("scale must be a number", "Tensor")),
    "scale a bool": Wrong({"scale": True}, TypeError, ("scale must be a number", "True")),
    "softcap negative": Wrong({"softcap": -1.0}, ValueError, ("softcap must be >= 0", "-1.0")),
    "softcap NaN": Wrong({"softcap": float("nan")}, ValueError, ("softcap must be finite", "nan")),
    "softcap None": Wrong({"softcap": None}, TypeError, ("softcap must be a number", "None")),
    "sink float64": Wrong({"sink": t(4, dtype=torch.float64)}, TypeError, ("sink must be float32", "float64")),
    "sink of another length": Wrong({"sink": t(2)}, ValueError, ("sink must have shape (heads_q,) = (4,)", "(2,)")),
    "sink a number": Wrong({"sink": 0.5}, TypeError, ("sink must be a torch.Tensor", "float")),
    "k elsewhere": Wrong({"k": t(2, 7, 2, 64, device="meta")}, ValueError, ("k is on meta, q on cpu", "one device")),
    "sink elsewhere": Wrong({"sink": t(4, device="meta")}, ValueError, ("sink is on meta, q on cpu", "one device")),
    "mask a list": Wrong({"mask": [True]}, TypeError, ("mask must be a flash3.Mask", "list")),
    "scale a list": Wrong({"scale": [0.5]}, TypeError, ("scale must be a number", "[0.5]")),
    "softcap a list": Wrong({"softcap": [0.5]}, TypeError, ("softcap must be a number", "[0.5]")),
    "backend a list": Wrong({"backend": ["cpu"]}, TypeError, ("backend must be a name or None", "['cpu']")),
    "unknown backend": Wrong({"backend": "abacus"}, ValueError, ("backend must be one of", "cpu", "'abacus'")),
}


def _refused(call, wrong):
    with pytest.raises(wrong.error) as caught:
        call()
    for words in wrong.says:
        assert words in str(caught.value), str(caught.value)


# Where a meta tensor meets others, torch itself calls the operator's shape function: of these `explain` alone is asked.
RUNNABLE = [n for n in ATTENTION if "elsewhere" not in n]


@pytest.mark.parametrize("name", RUNNABLE)
def test_attention(name):
    wrong = ATTENTION[name]
    for _ in range(2):  # what was refused once is not remembered as right
        _refused(lambda: flash3.attention(**{**DENSE, **wrong.arguments}), wrong)


@pytest.mark.parametrize("name", ATTENTION)
def test_explain_refuses_the_same(name):
    _refused(lambda: flash3.explain(**{**DENSE, **ATTENTION[name].arguments}), ATTENTION[name])


@pytest.mark.parametrize("name", [n for n in RUNNABLE if set(ATTENTION[n].arguments) <= set("qkv")])
def test_with_gradients_too(name):
    wrong = ATTENTION[name]
    arguments = {**DENSE, **wrong.arguments}
    floating = [n for n in "qkv" if isinstance(arguments[n], torch.Tensor) and arguments[n].dtype == torch.float32]
    arguments.update({n: arguments[n].clone().requires_grad_() for n in floating})
    _refused(lambda: flash3.attention(**arguments), wrong)


PACKED = {
    "q": t(12, 4, 64), "k": t(20, 2, 64), "v": t(20, 2, 64), "cu_seqlens_q": int32([0, 5, 12]), "cu_seqlens_k": int32([0, 8, 20]),
    "max_seqlen_q": 7, "max_seqlen_k": 12,
}  # fmt: skip
VARLEN = {
    "int64 starts": Wrong({"cu_seqlens_q": torch.tensor([0, 5, 12])}, TypeError, ("cu_seqlens_q must be int32", "int64")),
    "starts of rank 2": Wrong(
        {"cu_seqlens_k": int32([0, 8, 20])[None]}, ValueError, ("cu_seqlens_k must have shape (batch + 1,)", "(1, 3)")
    ),
    "no starts at all": Wrong({"cu_seqlens_q": int32([])}, ValueError, ("cu_seqlens_q must have shape (batch + 1,)", "(0,)")),
    "starts a list": Wrong({"cu_seqlens_q": [0, 5, 12]}, TypeError, ("cu_seqlens_q must be a torch.Tensor", "list")),
    "unequal batches": Wrong({"cu_seqlens_k": int32([0, 8, 12, 20])}, ValueError, ("batch size 2", "3")),
    "q of rank 4": Wrong({"q": t(2, 6, 4, 64)}, ValueError, ("q must have 3 dimensions (total, heads, dim)", "(2, 6, 4, 64)")),
    "k of rank 3, not packed": Wrong({"cu_seqlens_k": None}, ValueError, ("k must have 4 dimensions", "(20, 2, 64)")),
    "starts elsewhere": Wrong({"cu_seqlens_q": int32([0, 5, 12], "meta")}, ValueError, ("cu_seqlens_q is on meta", "cpu")),
    "used of another batch": Wrong({"seqused_k": int32([1, 2, 3])}, ValueError, ("seqused_k must have shape (2,)", "(3,)")),
    "used int64": Wrong({"seqused_q": torch.tensor([1, 2])}, TypeError, ("seqused_q must be int32", "int64")),
    "negative longest": Wrong({"max_seqlen_q": -1}, ValueError, ("max_seqlen_q must be >= 0", "-1")),
    "longest a word": Wrong({"max_seqlen_q": "7"}, TypeError, ("max_seqlen_q must be an int", "'7'")),
    "longest a fraction": Wrong({"max_seqlen_k": 7.5}, TypeError, ("max_seqlen_k must be an int", "7.5")),
}
VALUES = {
    "decreasing starts": Wrong(
        {"cu_seqlens_q": int32([0, 13, 12])}, ValueError, ("cu_seqlens_q must not decrease", "13 then 12", "index 2")
    ),
    "starts not from 0": Wrong({"cu_seqlens_k": int32([1, 8, 20])}, ValueError, ("cu_seqlens_k must start with 0", "got 1")),
    "negative starts": Wrong({"cu_seqlens_q": int32([0, -5, 12])}, ValueError, ("cu_seqlens_q must not decrease", "0 then -5")),
    "starts past the end": Wrong({"cu_seqlens_k": int32([0, 8, 21])}, ValueError, ("cu_seqlens_k ends at 21", "20 rows")),
    "used more than there is": Wrong({"seqused_k": int32([9, 1])}, ValueError, ("seqused_k[0] is 9", "0 to 8")),
    "used negative": Wrong({"seqused_q": int32([1, -2])}, ValueError, ("seqused_q[1] is -2", "0 to 7")),
    "longest too small": Wrong({"max_seqlen_k": 11}, ValueError, ("max_seqlen_k is 11", "12 tokens")),
}


@pytest.mark.parametrize("name", [n for n in (*VARLEN, *VALUES) if "elsewhere" not in n])
@pytest.mark.parametrize("function", [flash3.attention_varlen, flash_attn_varlen_func], ids=["flash3", "flash_attn"])
def test_varlen(function, name):
    wrong = {**VARLEN, **VALUES}[name]
    with flash3.settings.override(check_values=True):
        _refused(lambda: function(**{**PACKED, **wrong.arguments}), wrong)


@pytest.mark.parametrize("name", VARLEN)
def test_explain_refuses_the_same_of_varlen(name):
    _refused(lambda: flash3.explain(**{**PACKED, **VARLEN[name].arguments}), VARLEN[name])


def _cached(**changes):
    q, k, v = t(2, 3, 4, 64), t(6, 4, 2, 64), t(6, 4, 2, 64)
    cache = {"k": k, "v": v, "lengths": int32([5, 8]), "page_table": int32([[0, 1, 2], [3, 4, 5]])}
    call = {"q": q}
    for name, value in changes.items():
        (cache if name in KVCache.__dataclass_fields__ else call)[name] = value
    return {**call, "cache": KVCache(**cache)}


NEW = {"k_new": t(2, 3, 2, 64), "v_new": t(2, 3, 2, 64)}
COS = t(32, 16)
KVCACHE = {
    "no cache": Wrong({"q": t(2, 3, 4, 64), "cache": (t(2, 9, 2, 64),) * 2}, TypeError, ("cache must be a flash3.KVCache", "tuple")),
    "cache no tensor": Wrong(_cached(k=None), TypeError, ("cache.k must be a torch.Tensor", "NoneType")),
    "lengths a list": Wrong(_cached(lengths=[5, 8]), TypeError, ("cache.lengths must be a torch.Tensor", "list")),
    "lengths int64": Wrong(_cached(lengths=torch.tensor([5, 8])), TypeError, ("cache.lengths must be int32", "int64")),
    "lengths of another batch": Wrong(_cached(lengths=int32([5, 8, 2])), ValueError, ("batch size 2", "3")),
    "table int64": Wrong(_cached(page_table=torch.zeros(2, 3, dtype=torch.int64)), TypeError, ("page_table must be int32", "int64")),
    "table a list": Wrong(_cached(page_table=[[0, 1, 2], [3, 4, 5]]), TypeError, ("page_table must be a torch.Tensor", "list")),
    "table of rank 1": Wrong(
        _cached(page_table=int32([0, 1])), ValueError, ("page_table must have shape (batch, pages per sequence)", "(2,)")
    ),
    "table of other rows": Wrong(
        _cached(page_table=int32([[0, 1, 2]])), ValueError, ("page_table has 1 rows for a batch of 2", "batch_index")
    ),
    "pages of no slot": Wrong(_cached(k=t(6, 0, 2, 64), v=t(6, 0, 2, 64)), ValueError, ("page_size", ">= 1", "(6, 0, 2, 64)")),
    "leftpad int64": Wrong(_cached(leftpad=torch.tensor([0, 1])), TypeError, ("leftpad must be int32", "int64")),
    "batch_index of another batch": Wrong(_cached(batch_index=int32([0])), ValueError, ("batch_index must have shape (2,)", "(1,)")),
    "q of rank 3": Wrong(_cached(q=t(6, 4, 64)), ValueError, ("q must have 4 dimensions", "(6, 4, 64)")),
    "k_new alone": Wrong(_cached(k_new=NEW["k_new"]), ValueError, ("k_new and v_new go together", "v_new=None")),
    "new heads": Wrong(_cached(**{**NEW, "k_new": t(2, 3, 1, 64)}), ValueError, ("k_new must have shape (2, 3, 2, 64)", "(2, 3, 1, 64)")),
    "new dtype": Wrong(_cached(**{**NEW, "v_new": NEW["v_new"].half()}), TypeError, ("v_new must have the cache's dtype", "float16")),
    "new no tensor": Wrong(_cached(**{**NEW, "k_new": [1.0]}), TypeError, ("k_new must be a torch.Tensor", "list")),
    "num_splits": Wrong(_cached(num_splits=-2), ValueError, ("num_splits must be >= 0 or None", "-2")),
    "num_splits a fraction": Wrong(_cached(num_splits=1.5), TypeError, ("num_splits must be an int or None", "1.5")),
    "rotary alone": Wrong(_cached(rotary=Rotary(COS, COS)), ValueError, ("rotary needs k_new and v_new",)),
    "rotary a pair": Wrong(_cached(**NEW, rotary=(COS, COS)), TypeError, ("rotary must be a flash3.Rotary", "tuple")),
    "rotary too wide": Wrong(_cached(**NEW, rotary=Rotary(t(9, 33), t(9, 33))), ValueError, ("rotary.cos", "head_dim = 64", "(9, 33)")),
    "sin unlike cos": Wrong(_cached(**NEW, rotary=Rotary(COS, COS[:, :8])), ValueError, ("rotary.sin", "(32, 16)", "(32, 8)")),
    "too few positions": Wrong(
        _cached(**NEW, rotary=Rotary(COS[:10], COS[:10])), ValueError, ("rotary.cos has 10 positions", "position 10")
    ),
    "too few positions for the queries": Wrong(
        _cached(**NEW, q=t(2, 7, 4, 64), rotary=Rotary(COS[:12], COS[:12]), mask=Mask(causal=True)),
        ValueError,
        ("rotary.cos has 12 positions", "position 14"),
    ),
    "rotary of integers": Wrong(
        _cached(**NEW, rotary=Rotary(COS.int(), COS)), TypeError, ("rotary.cos must be floating point", "torch.int32")
    ),
    "rotary elsewhere": Wrong(_cached(**NEW, rotary=Rotary(COS, COS.to("meta"))), ValueError, ("rotary.sin is on meta, q on cpu",)),
    "rotary lengths of another batch": Wrong(
        _cached(**NEW, rotary=Rotary(COS, COS, lengths=int32([1]))), ValueError, ("rotary.lengths must have shape (2,) on cpu, got (1,)",)
    ),
    "rotary lengths a list": Wrong(
        _cached(**NEW, rotary=Rotary(COS, COS, lengths=[1, 2])), TypeError, ("rotary.lengths must be a torch.Tensor", "list")
    ),
    "rotary lengths floats": Wrong(
        _cached(**NEW, rotary=Rotary(COS, COS, lengths=torch.ones(2))), TypeError, ("rotary.lengths must be int32", "float32")
    ),
    "q no tensor": Wrong(_cached(q=[[1.0]]), TypeError, ("q must be a torch.Tensor", "list")),
    "gradient": Wrong(_cached(q=t(2, 3, 4, 64).requires_grad_()), ValueError, ("q requires a gradient", "torch.no_grad()")),
    # by value, in checking mode
    "page that is not there": Wrong(_cached(page_table=int32([[0, 6, 2], [3, 4, 5]])), ValueError, ("page_table[0, 1] is 6", "0 to 5")),
    "page negative": Wrong(_cached(page_table=int32([[0, 1, 2], [3, -1, 5]])), ValueError, ("page_table[1, 1] is -1", "0 to 5")),
    "length negative": Wrong(_cached(lengths=int32([5, -1])), ValueError, ("lengths[1] is -1", "0 to 12")),
    "length beyond the table": Wrong(_cached(lengths=int32([13, 1])), ValueError, ("lengths[0] is 13", "0 to 12")),
    "no room for the new": Wrong(_cached(**NEW, lengths=int32([5, 10])), ValueError, ("lengths[1] is 13", "0 to 12")),
    "appended to one page twice": Wrong(
        _cached(**NEW, lengths=int32([4, 6]), page_table=int32([[0, 1, 2], [3, 1, 5]])),
        ValueError,
        ("several tokens for slot 2 of page 1", "share a page"),
    ),
    "leftpad negative": Wrong(_cached(leftpad=int32([-1, 0])), ValueError, ("leftpad[0] is -1", "0 to 12")),
    "row that is not there": Wrong(_cached(batch_index=int32([0, 2])), ValueError, ("batch_index[1] is 2", "0 to 1")),
}


@pytest.mark.parametrize("wrong", KVCACHE.values(), ids=KVCACHE)
def test_kvcache(wrong):
    with flash3.settings.override(check_values=True):
        _refused(lambda: flash3.attention_kvcache(**wrong.arguments), wrong)


MERGE = {
    "lse not float32": Wrong({"lses": t(2, 1, 4, 5, dtype=torch.bfloat16)}, TypeError, ("lses must be float32 or float64", "bfloat16")),
    "heads last": Wrong({"lses": t(2, 1, 5, 4)}, ValueError, ("lses must have shape (2, 1, 4, 5)", "heads before queries", "(2, 1, 5, 4)")),
    "one lse too few": Wrong({"lses": t(1, 1, 4, 5)}, ValueError, ("lses must have shape (2, 1, 4, 5)", "(1, 1, 4, 5)")),
    "nothing": Wrong({"outs": t(0, 1, 5, 4, 8), "lses": t(0, 1, 4, 5)}, ValueError, ("n >= 1", "(0, 1, 5, 4, 8)")),
    "rank": Wrong({"outs": t(2, 5, 8)}, ValueError, ("outs must have shape", "(2, 5, 8)")),
    "outs no tensor": Wrong({"outs": 3}, TypeError, ("outs must be a torch.Tensor", "int")),
    "outs of unequal shapes": Wrong({"outs": [t(1, 5, 4, 8), t(1, 5, 4, 16)]}, ValueError, ("outs must be", "one shape", "(1, 5, 4, 16)")),
    "outs of no tensors": Wrong({"outs": [1.0, 2.0]}, TypeError, ("outs[0] must be a torch.Tensor", "float")),
    "outs of nothing": Wrong({"outs": [], "lses": []}, ValueError, ("n >= 1",)),
    "out_dtype of integers": Wrong(
        {"out_dtype": torch.int32}, TypeError, ("out_dtype must be a floating point torch.dtype", "torch.int32")
    ),
    "out_dtype a word": Wrong({"out_dtype": "float16"}, TypeError, ("out_dtype must be a floating point torch.dtype", "'float16'")),
    "lses elsewhere": Wrong({"lses": t(2, 1, 4, 5, device="meta")}, ValueError, ("lses are on meta, outs on cpu",)),
    "outs integers": Wrong({"outs": t(2, 1, 5, 4, 8, dtype=torch.int32)}, TypeError, ("outs must be floating", "int32")),
}


@pytest.mark.parametrize("wrong", MERGE.values(), ids=MERGE)
def test_merge(wrong):
    _refused(lambda: flash3.merge(**{"outs": t(2, 1, 5, 4, 8), "lses": t(2, 1, 4, 5), **wrong.arguments}), wrong)


def test_requires_grad_on_float8():
    q = t(1, 4, 1, 64).to(E4M3)
    for call in (lambda: flash3.attention(q.requires_grad_(), q, q), lambda: flash_attn_func(q.requires_grad_(), q, q)):
        _refused(call, Wrong({}, ValueError, ("requires_grad", "float8_e4m3fn", "detach")))


def test_flash_attention_3_names():
    """What its own functions add to the checks above."""
    q, cache = t(2, 3, 4, 64), t(2, 9, 2, 64)
    starts = int32([0, 3, 6])
    wrongs = [
        (lambda: flash_attn_with_kvcache(q, cache, cache, rotary_cos=COS), ValueError, ("rotary_cos and rotary_sin go together",)),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=10), ValueError, ("lengths[0] is 10", "0 to 9")),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=torch.tensor([1, 2])), TypeError, ("int32", "int64")),
        (lambda: flash_attn_func(q, cache, cache, window_size=(-2, 0)), ValueError, ("left must be None, -1", "-2")),
        (lambda: flash_attn_func(q, cache, cache, window_size=(3,)), ValueError, ("window_size", "(3,)")),
        (lambda: flash_attn_func(q, cache, cache, window_size=3), TypeError, ("window_size", "3")),
        (lambda: flash_attn_func(q, cache, cache, attention_chunk=-4), ValueError, ("chunk must be an integer >= 1", "-4")),
        (lambda: flash_attn_func(q, cache, cache, qv=t(2, 3, 4, 32)), ValueError, ("qv must have shape (2, 3, 4, 64)", "(2, 3, 4, 32)")),
        (lambda: flash_attn_varlen_func(q[0], q[0], q[0], starts, starts, 3, 3), ValueError, ("cu_seqlens_q ends at 6", "3 rows")),
        (lambda: flash_attn_combine(t(2, 1, 5, 4, 8), t(2, 1, 4, 5)), ValueError, ("lse",)),
        (lambda: flash_attn_combine([1.0], t(2, 1, 4, 5)), TypeError, ("out_partial must be a torch.Tensor", "list")),
        (lambda: flash_attn_combine(t(2, 1, 5, 4, 8), t(2, 1, 5, 4), out=t(5, 4, 8)), ValueError, ("out must have shape (1, 5, 4, 8)",)),
        (lambda: flash_attn_func([1.0], cache, cache), TypeError, ("q must be a torch.Tensor", "list")),
        (lambda: flash_attn_func(q, cache, cache, sinks=[0.0] * 4), TypeError, ("sinks must be a torch.Tensor", "list")),
        (lambda: flash_attn_varlen_func(None, cache, cache, starts, starts, 3, 3), TypeError, ("q must be a torch.Tensor", "NoneType")),
        (lambda: flash_attn_qkvpacked_func([1.0]), TypeError, ("qkv must be a torch.Tensor", "list")),
        (lambda: flash_attn_with_kvcache([1.0], cache, cache), TypeError, ("q must be a torch.Tensor", "list")),
        (lambda: flash_attn_with_kvcache(q, [1.0], cache), TypeError, ("k_cache must be a torch.Tensor", "list")),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cu_seqlens_q=[0, 3]), TypeError, ("cu_seqlens_q must be a torch.Tensor",)),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3.5), TypeError, ("cache_seqlens must be an int", "3.5")),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=True), TypeError, ("cache_seqlens must be an int", "True")),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=[3, 4]), TypeError, ("cache_seqlens must be an int", "[3, 4]")),
        (lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=1 << 40), ValueError, ("cache_seqlens must be", str(1 << 40))),
    ]  # fmt: skip
    for call, error, says in wrongs:
        _refused(call, Wrong({}, error, says))


@pytest.mark.parametrize(
    ("starts", "error", "says"),
    [
        (int32([0, 4, 9]), ValueError, ("cu_seqlens_k_new ends at 9", "6 rows")),
        (int32([0, 4, 2]), ValueError, ("cu_seqlens_k_new must not decrease", "4 then 2")),
        (int32([1, 4, 6]), ValueError, ("cu_seqlens_k_new must start with 0", "got 1")),
        (int32([0, 6]), ValueError, ("cu_seqlens_k_new must have shape (3,) on cpu", "(2,)")),
        (torch.tensor([0, 4, 6]), TypeError, ("cu_seqlens_k_new must be int32", "int64")),
        ([0, 4, 6], TypeError, ("cu_seqlens_k_new must be a torch.Tensor", "list")),
    ],
)
def test_starts_of_packed_new_keys(starts, error, says):
    """A wrong start sent tokens to wrong slots of the cache."""
    q, cache, new = t(2, 3, 4, 64), t(2, 9, 2, 64), torch.ones(6, 2, 64)
    call = lambda: flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=int32([1, 2]), cu_seqlens_k_new=starts)  # noqa: E731
    _refused(call, Wrong({}, error, says))
    assert (cache == 0).all()


def test_mask_arguments():
    wrongs = [
        ({"left": -2}, ValueError, ("left must be None, -1 (unbounded) or an integer >= 0", "-2")),
        ({"right": 1.5}, TypeError, ("right must be an integer or None", "1.5")),
        ({"causal": 1}, TypeError, ("causal must be True or False", "1")),
        ({"chunk": 0}, ValueError, ("chunk must be an integer >= 1", "0")),
        ({"q_offset": 1 << 29}, ValueError, ("q_offset must be", str(1 << 29))),
        ({"k_offset": None}, TypeError, ("k_offset must be an integer", "None")),
    ]
    for arguments, error, says in wrongs:
        _refused(lambda arguments=arguments: Mask(**arguments), Wrong({}, error, says))


def test_values_are_read_only_where_that_is_free():
    """Meta tensors have no values: nothing tries to read them, and shapes are checked all the same."""
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in PACKED.items()}
    assert flash3.explain(**meta).problem.sizes.batch == 2
    _refused(lambda: flash3.explain(**{**meta, "q": meta["q"][:, :3]}), Wrong({}, ValueError, ("q has 3 heads and k 2",)))


def test_a_backend_that_cannot():
    """NotImplementedError lists each backend with its reason."""
    meta = {n: x.to("meta") for n, x in DENSE.items()}
    explained = flash3.explain(**meta)
    with pytest.raises(NotImplementedError, match=r"no backend supports this call \(.*cpu: its tensors must be on the CPU.*\)"):
        dispatch.choose(explained.problem)


@pytest.mark.parametrize("name", ["page_table", "batch_index", "leftpad"])
def test_explain_of_a_cache_needs_its_lengths(name):
    with pytest.raises(ValueError, match=f"{name} needs seqused_k"):
        flash3.explain(**DENSE, **{name: torch.zeros(2, dtype=torch.int32)})
