"""Command line: one module per command, which adds its arguments and runs it."""
