"""Division of a case's nodes among experts trained in parallel, to minimize the last end.

Entry point: `search.divide`.
"""
