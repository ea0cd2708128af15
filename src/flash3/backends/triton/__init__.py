"""The Triton backend: FlashAttention-2's algorithm for any NVIDIA GPU from Ampere on, and for tests under Triton's interpreter."""
