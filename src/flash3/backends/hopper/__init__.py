"""Hopper (sm_90a) kernels in CuTe DSL. `plan.HopperBackend` is the door; nothing here imports a framework."""
