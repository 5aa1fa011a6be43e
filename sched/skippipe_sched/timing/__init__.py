"""Compute the time that a plan takes: simulation, averaging, jitter, traffic and bounds.

Bounds need SciPy, which is imported when a bound is asked for.
"""
