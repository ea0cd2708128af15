"""The oracle: what every backend is held against. Plain formulas in float64; nothing here is fast, everything should be easy to believe.

forward, backward   attention and its closed-form gradients
merge               partial results over disjoint keys
blockwise           the FlashAttention-3 paper's Algorithms 1 and 2 in plain loops, with the kernels' block order and roundings
plain, error        plain torch attention in the inputs' own dtype, and how much worse than that a backend may be
"""

from .backward import gradients
from .error import Report, check, compare
from .forward import attention
from .merge import merge
from .plain import plain, plain_gradients

__all__ = ["Report", "attention", "check", "compare", "gradients", "merge", "plain", "plain_gradients"]
