"""Compiled search: annealing of candidates, judged by the timing model on arrays.

Entry points: `annealer` (runs of chains), `budget` (the limits of a search) and `compiled`.
"""
