"""Peers that are not here: their calls against the signatures that they have (FlashAttention-3's operator as its library declares it)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flash3.bench import other_peers
from flash3.bench.case import Case, make
from flash3.bench.catalogue import WORKLOADS
from flash3.bench.providers import Unsupported
from flash3.mask import Mask
from flash3.problem import Task

SCHEMA = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, "
    "Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, "
    "int attention_chunk, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? sinks) -> Tensor[]"
)
NAMES = [word.split()[-1] for word in SCHEMA[4 : SCHEMA.index(")")].split(",")]


@pytest.fixture
def fa3(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The operator, which remembers its arguments."""
    calls: list[dict[str, Any]] = []

    def fwd(*arguments: Any) -> list[torch.Tensor]:
        calls.append(dict(zip(NAMES, arguments, strict=True)))
        return [arguments[0].clone(), arguments[0].new_zeros(1)]

    library = torch.library.Library("sgl_kernel", "DEF")
    library.define(SCHEMA)
    library.impl("fwd", fwd, "CompositeExplicitAutograd")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    other_peers._fa3_forward.cache_clear()
    yield calls
    other_peers._fa3_forward.cache_clear()
    library._destroy()


def small(name: str, task: Task = Task.FORWARD) -> Case:
    return make(WORKLOADS[name].small(), task, torch.device("cpu"))


def called(calls: list[dict[str, Any]], name: str) -> dict[str, Any]:
    case = small(name)
    prepared = other_peers._fa3_operator("its.so", case)
    (out,) = prepared.outputs(prepared.call())
    assert out.shape == case.request.q.shape
    return calls[-1]


def test_fa3_gets_what_its_operator_asks_for(fa3: list[dict[str, Any]]) -> None:
    given = called(fa3, "paper/d128-causal-4k")
    assert given["is_causal"] is True
    assert given["softmax_scale"] == pytest.approx(128**-0.5)
    assert (given["num_splits"], given["softcap"], given["cu_seqlens_q"]) == (1, 0.0, None)
    assert (given["window_size_left"], given["window_size_right"]) == (-1, -1)
    window = called(fa3, "models/gemma-2-9b-window")
    assert window["window_size_left"] == WORKLOADS["models/gemma-2-9b-window"].small().mask.left
    assert window["softcap"] == 50.0
    packed = called(fa3, "packed/lognormal-64k-full")
    assert packed["cu_seqlens_q"].dtype == torch.int32
    assert packed["max_seqlen_k"] == WORKLOADS["packed/lognormal-64k-full"].small().k_len
    pages = called(fa3, "decode/b8-8k-paged")
    assert pages["page_table"] is not None
    assert pages["seqused_k"] is not None
    assert pages["num_splits"] == 0  # few queries: as many splits as it likes


def test_fa3_says_what_it_has_not(fa3: list[dict[str, Any]]) -> None:
    with pytest.raises(Unsupported, match="forward only"):
        other_peers._fa3_operator("its.so", small("paper/d128-causal-4k", Task.BACKWARD))
    with pytest.raises(Unsupported, match="no sink"):
        other_peers._fa3_operator("its.so", small("models/gpt-oss-window"))
    with pytest.raises(Unsupported, match="no chunked masks"):
        other_peers._fa3_operator("its.so", small("window/chunks-of-8k"))
    with pytest.raises(ValueError, match=r"no arguments \['causal'\]"):
        other_peers.fa3_launch("its.so", q=torch.zeros(1, 1, 1, 8), causal=True)


def test_flash3_under_its_name_is_not_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    import flash3

    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash3.flash_attn_interface)
    assert other_peers._fa3_module() is None
    real = types.ModuleType("flash_attn_interface")
    real.__spec__ = types.SimpleNamespace(name="flash_attn_interface")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "flash_attn_interface", real)
    assert other_peers._fa3_module() is real


def test_windows_as_flash_attention_takes_them() -> None:
    assert other_peers.window_of(Mask()) == (None, None)
    assert other_peers.window_of(Mask(causal=True, left=7)) == (7, 0)
    assert other_peers.window_of(Mask(left=7, right=3)) == (7, 3)
