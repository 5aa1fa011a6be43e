"""Compiled search: annealing of candidates, judged by the timing model on arrays.

Methods use `annealer` (runs of chains), `budget` (the limits of a search) and `compiled`.
"""
