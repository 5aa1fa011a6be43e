"""Programs to iterations: jitted stage functions, state, dispatch, transfers, averaging."""
