"""The planner: the quality of its plans, how long it takes, and what cases bring."""
