"""Programs to iterations: jitted stage functions, state of nodes, dispatch, transfers, averaging."""
