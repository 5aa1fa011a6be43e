"""Plans as pictures and traces: `gantt`, `flows`, `paths`, `trace`.

Other pictures, of runs, are drawn with `svg`, `colours` and `amounts` too.
"""
