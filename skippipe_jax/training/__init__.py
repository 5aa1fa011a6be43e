"""A training run: set-up, loop, validation, metrics."""
