"""FlashAttention-3, complete, in Python."""
