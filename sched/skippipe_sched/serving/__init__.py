"""Serving a model over scattered hosts: which stages each holds, routes, predictions and bounds.

Others use `case.ServingCase`, which measured arrays fill, `placing.place`, `routing.routes`,
`simulate.simulate` and `bound.bounds`, whose results are tuples and numbers.
"""
