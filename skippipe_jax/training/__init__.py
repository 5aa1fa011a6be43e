"""Training runs: read `trainer`, `session` and `setup` in this order.

`callbacks` observe it, `elastic` handles hosts that are lost or join, `replan` searches for better
plans while it trains. The package exports `Trainer`, `RunResult`, `Callback`, `RunView` and
`make_plan`; commands also use `planning` and `elastic.joining`, experts `initial_weights`.
"""
