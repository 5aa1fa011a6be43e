"""Pictures and pages of what runs measured. No JAX.

Others use `page.report`, `metrics.load_metrics`, `curves.curve` and `evaluation_plot.picture`.
"""
