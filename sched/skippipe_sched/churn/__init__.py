"""Simulation of runs whose hosts fail and return, by recovery policy.

Entry points: `sweep` draws faults, simulates a run under each of the `policies` and finds the fault
rate from which another policy pays more; `picture` draws the result. `simulation` simulates one
run.
"""
