"""Tuning: which tiles are fastest for a workload, measured; and kernels compiled ahead.

candidates  legal tiles of a workload, and what became of each
journal     what is known already, so that a killed run goes on where it was
search      compile, check, then successive halving
ahead       compiling in parallel processes, without a GPU
"""
