"""Serving a model on scattered hosts: placement of stages, routes, predictions and bounds.

Entry points: `case.ServingCase`, which measured arrays fill, `placing.place`, `routing.routes`,
`simulate.simulate` and `bound.bounds`, whose results are tuples and numbers.
"""
