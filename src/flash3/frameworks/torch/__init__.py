"""flash3 on torch tensors: the public functions, their operators and gradients."""

from .attention import attention, attention_varlen, explain
from .kvcache import KVCache, Rotary, attention_kvcache
from .merge import merge

__all__ = ["KVCache", "Rotary", "attention", "attention_kvcache", "attention_varlen", "explain", "merge"]
