"""Simulation of runs whose hosts fail and return, by recovery policy.

Entry points: `sweep` (many runs under each of the `policies`), `simulation` (one run), `picture`.
"""
