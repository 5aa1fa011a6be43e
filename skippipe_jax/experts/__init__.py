"""Experts: runs that branch from seed models, each on its own domain, and what they say together.

Others start `skippipe experts`, or ``skippipe experts``.
"""
