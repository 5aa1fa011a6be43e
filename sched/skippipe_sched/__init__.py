"""The planner: places nodes on stages and finds the path of every microbatch. Never imports JAX."""
