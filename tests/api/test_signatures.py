"""The public names and their parameters, one by one: flash3's own and FlashAttention-3's."""

import inspect
import subprocess
import sys

import pytest
import torch

import flash3
from flash3 import flash_attn_interface

OPTIONS = "mask=None, scale=None, softcap=0.0, sink=None, return_lse=False"
OURS = {
    "attention": f"q, k, v, *, {OPTIONS}, deterministic=False, backend=None",
    "attention_varlen": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, seqused_q=None, seqused_k=None, "
    f"{OPTIONS}, deterministic=False, backend=None",
    "attention_kvcache": "q, cache, *, k_new=None, v_new=None, rotary=None, cu_seqlens_q=None, max_seqlen_q=None, "
    f"{OPTIONS}, num_splits=None, backend=None",
    "KVCache": "k, v, lengths, *, page_table=None, batch_index=None, leftpad=None",
    "Rotary": "cos, sin, *, interleaved=False, lengths=None",
    "merge": "outs, lses, *, out_dtype=None",
    "Mask": "*, causal=False, left=None, right=None, chunk=None, q_offset=None, k_offset=0",
    "install": "",
}

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
WINDOW = "window_size=(-1, -1), attention_chunk=0"
FLASH_ATTENTION_3 = {
    "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, qv=None, {DESCALES}, {WINDOW}, softcap=0.0, num_splits=1, "
    "pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, "
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, {WINDOW}, softcap=0.0, num_splits=1, pack_gqa=None, "
    "deterministic=False, sm_margin=0, return_attn_probs=False",
    "flash_attn_qkvpacked_func": f"qkv, softmax_scale=None, causal=False, {DESCALES}, {WINDOW}, softcap=0.0, deterministic=False, "
    "num_heads_q=None, sm_margin=0, return_attn_probs=False",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
    "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, "
    f"rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, {WINDOW}, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
    "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, "
    "qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None, page_size=None, "
    f"max_seqlen_k_new=0, causal=False, {WINDOW}, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}
EXTRAS = "*, s_aux=None, sinks=None, out=None"
"""What the forks of FlashAttention-3 have besides, keyword-only and after its own."""
HAVE_EXTRAS = {"flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"}


def parameters(function):
    """(name, kind, default) of each parameter: annotations may differ, these may not."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def expected(text):
    """The parameters of a signature written as text."""
    return parameters(eval(f"lambda {text}: None", {"torch": torch}))


@pytest.mark.parametrize("name", OURS)
def test_ours(name):
    assert parameters(getattr(flash3, name)) == expected(OURS[name])


@pytest.mark.parametrize("name", FLASH_ATTENTION_3)
def test_flash_attention_3(name):
    extras = f", {EXTRAS}" if name in HAVE_EXTRAS else ""
    assert parameters(getattr(flash_attn_interface, name)) == expected(FLASH_ATTENTION_3[name] + extras)


def test_explain_takes_what_attention_takes():
    q = torch.randn(1, 3, 2, 64)
    names = [name for name, kind, _ in parameters(flash3.attention) if kind is inspect.Parameter.KEYWORD_ONLY]
    values = {"mask": flash3.Mask(causal=True), "scale": 1.0, "softcap": 2.0, "sink": torch.zeros(2), "return_lse": True,
              "deterministic": True, "backend": "cpu"}  # fmt: skip
    assert set(names) == set(values)
    assert flash3.explain(q, q, q, **values).backend == "cpu"
    packed = {"cu_seqlens_q": torch.tensor([0, 3], dtype=torch.int32), "max_seqlen_q": 3}
    packed |= {name.replace("_q", "_k"): x for name, x in packed.items()}
    explained = flash3.explain(q[0], q[0], q[0], **packed, seqused_k=torch.tensor([2], dtype=torch.int32))
    assert explained.problem.spec.q_sequences.value == "packed"
    assert flash3.explain(explained.problem).backend == explained.backend == "cpu"
    with pytest.raises(TypeError, match="only backend"):
        flash3.explain(explained.problem, mask=None)


def test_public_names():
    assert {*OURS, "explain", "Problem", "settings", "flash_attn_interface"} <= set(flash3.__all__)
    assert set(flash3.__all__) <= set(dir(flash3))
    for name in flash3.__all__:
        assert getattr(flash3, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        _ = flash3.atention


@pytest.mark.parametrize("function", [*OURS, "explain"])
def test_docstrings_name_every_parameter(function):
    documented = inspect.getdoc(getattr(flash3, function))
    for name, kind, _ in parameters(getattr(flash3, function)):
        assert name in documented or kind is inspect.Parameter.VAR_KEYWORD, f"{function}: {name}"


def _python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_importing_flash3_loads_no_framework():
    done = _python(
        "import sys, flash3; flash3.Mask(causal=True); print([m for m in ('torch', 'jax', 'triton', 'cutlass') if m in sys.modules])"
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_install():
    """A program written for FlashAttention-3 finds ours; installing twice does no harm."""
    done = _python(
        "import flash3; flash3.install(); flash3.install()\n"
        "import flash_attn_interface, torch\n"
        "from flash_attn_interface import flash_attn_func\n"
        "assert flash_attn_interface is flash3.flash_attn_interface\n"
        "q = torch.randn(1, 4, 2, 64); print(tuple(flash_attn_func(q, q, q, causal=True).shape))"
    )
    assert done.stdout.strip() == "(1, 4, 2, 64)", done.stderr


def test_install_refuses_to_replace_another():
    """Who imported another flash_attn_interface holds its functions already."""
    done = _python(
        "import sys, types; other = types.ModuleType('flash_attn_interface'); other.__file__ = '/elsewhere/it.py'\n"
        "sys.modules['flash_attn_interface'] = other\n"
        "import flash3\n"
        "try:\n    flash3.install()\n"
        "except RuntimeError as error:\n    print(error); assert sys.modules['flash_attn_interface'] is other"
    )
    assert "already imported from /elsewhere/it.py" in done.stdout, done.stderr
