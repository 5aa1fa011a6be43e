"""Programs to iterations: jitted stage functions, state, dispatch, transfers, averaging.

Others use `runtime.open_runtime` and `Runtime.run`, `state` for where stages come from,
`transport` to open transfers, and `stage_functions`.
"""
