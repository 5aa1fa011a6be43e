"""Time that a plan takes: simulation, averaging, jitter, traffic and bounds.

Only computing a bound imports SciPy.
"""
