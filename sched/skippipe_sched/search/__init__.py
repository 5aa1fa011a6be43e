"""Compiled search: annealing of candidates, judged by the timing model on arrays.

Methods use `annealer` (chains at work), `budget` (what a search may take) and `compiled`.
"""
