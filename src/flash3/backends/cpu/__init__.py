"""The CPU backend: torch's fused attention where mask and layout allow, blocks of keys otherwise."""
