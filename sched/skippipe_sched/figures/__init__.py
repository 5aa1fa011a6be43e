"""Pictures and traces of plans: `gantt`, `flows`, `paths`, `trace`.

`svg`, `colours` and `amounts` are also used by pictures of runs.
"""
