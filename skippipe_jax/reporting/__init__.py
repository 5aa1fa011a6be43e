"""Pictures and pages of what runs measured, and their status as text. No JAX.

Others use `page.report`, `metrics.load_metrics`, `line_chart`, `timelines.draw_recorded` and
`status.status_text`.
"""
