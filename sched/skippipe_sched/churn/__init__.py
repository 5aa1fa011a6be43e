"""Churn on paper: how much a run gets done whose hosts vanish and come back, by what it does then.

Others use `sweep`, which draws faults, lets a run live through them by each of the `policies`, and
says from which rate of faults on another pays more; and `picture`. `life` is one run.
"""
