"""Measurement of a cluster's links, stages and devices, as a case for the planner.

Entry points: `cluster.measure`, which all hosts call together, `case` and `devices`.
"""
