"""Division of a case's nodes among experts that train in parallel, for the earliest last end.

Public modules: `dividing.divide`, which makes a `lanes.Division` of lanes, and `picture`.
"""
