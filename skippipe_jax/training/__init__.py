"""Training runs: read `trainer`, `session` and `setup` in this order.

`callbacks` observe a run, `elastic` handles hosts that fail or join, `replan` searches for better
plans meanwhile, and `planning` makes plans before it.
"""
