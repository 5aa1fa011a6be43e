"""Experts: runs that branch from seed models, each on its own domain, and what they say together.

Others start `python -m skippipe_jax.experts`, or ``skippipe experts``.
"""
