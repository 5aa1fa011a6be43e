"""How long a plan takes: simulation, averaging, jitter, traffic, and a bound that no plan beats.

Others use `simulate` first of all; `bound` alone needs SciPy, and is loaded where a bound is asked.
"""
