"""Charts and pages of the measurements of a run, and its status as text.

Imports no JAX. Entry points: `page`, `line_chart`, `timelines` and `status`.
"""
