"""A training run. To read how one goes: `trainer`, then `session`, then `setup`.

`callbacks` follow a run, `elastic` goes on with other hosts, `replan` looks for better plans.
Others use `Trainer`, `Callback`, `RunView` and `make_plan`, which the face offers.
"""
