"""What several experts say together: posterior and priors over them, and mixtures of what they say.

Others use `posterior`, `priors` and `mixtures`, pure functions in the dtype of what they are given,
and `mixing`, which evaluates one float per token in float64.
"""
