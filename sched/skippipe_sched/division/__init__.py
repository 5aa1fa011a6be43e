"""Division of a case's nodes among experts trained in parallel, to minimize the last end.

Entry points: `search.divide`, which makes a `lanes.Division` of lanes, and `picture`.
"""
