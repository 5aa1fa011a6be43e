"""Measuring a cluster: links, stages and devices, as a case to plan for.

Others use `cluster.measure`, on all hosts together, what `case` makes of it, and `devices`.
"""
