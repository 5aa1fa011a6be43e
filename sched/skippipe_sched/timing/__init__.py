"""Time that a plan takes: simulation, averaging, jitter, traffic and bounds.

Bounds need SciPy, which is imported only when a bound is computed.
"""
