"""Who is here: the hosts of a run, what they tell each other, and how they end together.

Others use `membership.joined`, the verbs of `agreement`, and `addresses`. `hub` and `place` belong
to the membership; `jax_runtime` is all that touches `jax._src`.
"""
