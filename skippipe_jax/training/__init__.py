"""A training run. To read how one goes: `trainer`, then `setup`, then `planning`.

`metrics` reads how iterations ended; `validation`, `callback` and what follows a run come beside.
Others use `Trainer`, `Callback` and `make_plan`, which the face offers.
"""
