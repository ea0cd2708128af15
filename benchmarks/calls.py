"""Calls of built kernels on torch tensors, the way the backend's plan makes them, without the library around."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flash3.backends.hopper import launch
from flash3.mask import FULL, Mask
from flash3.problem import Sizes

from .configurations import CONFIGURATIONS
from .objects import kernel


@functools.cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


@functools.cache
def counter() -> torch.Tensor:
    """One for this process: everything here runs on one stream at a time."""
    return torch.zeros(1, device="cuda", dtype=torch.int32)


@dataclass(kw_only=True)
class Call:
    """One dense call. q (b, sq, h, d), k and v (b, sk, hk, ·)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: Mask = FULL
    scale: float | None = None
    softcap: float = 0.0
    sink: torch.Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    def outputs(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Full of NaN: whatever is not written shows."""
        spec, _ = CONFIGURATIONS[name]
        b, s, h, _ = self.q.shape
        out = torch.full((b, s, h, self.v.shape[-1]), float("nan"), device="cuda", dtype=getattr(torch, spec.out_dtype.value))
        return out, torch.full((b, h, s), float("nan"), device="cuda", dtype=torch.float32)

    def launcher(self, name: str, out: torch.Tensor, lse: torch.Tensor) -> Callable[[], None]:
        """A function without arguments that launches once into out and lse."""
        spec, tiles = CONFIGURATIONS[name]
        (b, sq, h, _), (_, sk, hk, _) = self.q.shape, self.k.shape
        sizes = Sizes(
            batch=b,
            heads_q=h,
            heads_kv=hk,
            q_len=sq,
            k_len=sk,
            total_q=b * sq,
            page_size=0,
            scale=self.softmax_scale,
            softcap=self.softcap,
        )
        numbers = launch.numbers(spec, tiles, sizes, self.mask, _multiprocessors())
        arguments: tuple[Any, ...] = (self.q, self.k, self.v, out, lse if spec.lse else None, self.sink, counter(), numbers)
        return functools.partial(kernel(name), *arguments)
