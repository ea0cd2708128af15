"""flash3 on torch tensors: the public functions, their operators and gradients."""

from .functions import attention, attention_varlen, explain
from .kvcache import KVCache, Rotary, attention_kvcache
from .merging import merge

__all__ = ["KVCache", "Rotary", "attention", "attention_kvcache", "attention_varlen", "explain", "merge"]
