"""Pictures and pages of what runs measured. No JAX.

Others use `page.report`, `metrics.load_metrics`, `line_chart` and
`timelines.draw_recorded`.
"""
