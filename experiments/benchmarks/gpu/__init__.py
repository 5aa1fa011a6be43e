"""One accelerator: training against a plain step, and its parts."""
