"""torch tensors as descriptions: metadata only, so fake and meta tensors work too."""

from __future__ import annotations

import functools

import torch

from ...problem import Device, DType, TensorInfo

DTYPES: dict[torch.dtype, DType] = {getattr(torch, d.value): d for d in DType}


@functools.cache
def device_of(device: torch.device) -> Device:
    """A torch device with what planning needs to know of it."""
    if device.type != "cuda":
        return Device(device.type)
    facts = torch.cuda.get_device_properties(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return Device("cuda", index, (facts.major, facts.minor), facts.multi_processor_count, facts.name)


def describe(t: torch.Tensor) -> TensorInfo:
    """Shape, strides, dtype, device and alignment of a tensor.

    Raises:
        TypeError: not a tensor.
    """
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, got {type(t).__name__}: {t!r}")
    dtype = DTYPES.get(t.dtype, str(t.dtype).removeprefix("torch."))
    # Allocators align storage to more than 16 bytes, so the offset decides; fake tensors have one too.
    aligned = t.storage_offset() * t.element_size() % 16 == 0
    return TensorInfo(dtype, tuple(t.shape), tuple(t.stride()), device_of(t.device), aligned)


def dtype_of(dtype: DType) -> torch.dtype:
    """The torch dtype of the same name."""
    return getattr(torch, dtype.value)
