"""Serving a model on scattered hosts: placement of stages, routes, predictions and bounds.

Entry points: `case.ServingCase`, `placing.place`, `routing.routes`, `simulate.simulate` and
`bound.bounds`.
"""
