"""The time that a plan takes: simulation, averaging, jitter, traffic, and bounds that no plan beats.

Others use `simulate` first of all; bounds alone need SciPy, and are loaded where one is asked for.
"""
