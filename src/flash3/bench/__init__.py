"""Measuring: named workloads, providers of attention, clocks, and what becomes of the numbers.

workloads   what is measured, as a description;  catalogue  by name, shared with tests and with the tuner
providers   flash3 and its backends;  torch_peers, other_peers  every other attention that can be had, behind one call
clock       one run, timed: by CUDA events, from a graph, with a cold L2, or by the wall clock
protocol    many providers, timed fairly: interleaved rounds, or each alone at the power limit
roofline    rates of the machine, and what they allow
accuracy    errors against float64
results     rows, the report, JSON and CSV;  tables, pictures, page: for people
"""
