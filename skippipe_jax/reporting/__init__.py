"""Charts and pages of the measurements of a run, and its status as text. Imports no JAX.

Other packages use `page.report`, `page.curves`, `line_chart`, `timelines.draw_recorded`
and `status.status_text`.
"""
