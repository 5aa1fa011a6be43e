"""Pictures and pages of what runs measured. No JAX.

Others use `page.report`, `metrics.load_metrics`, `curves.curve`, `evaluation_plot.picture` and
`timelines.draw_recorded`.
"""
