"""Posterior and priors over experts, and mixtures of their predictions.

Others use `posterior`, `priors` and `mixtures`, pure functions in the dtype of what they are given,
and `mixing`, which evaluates one float per token in float64.
"""
