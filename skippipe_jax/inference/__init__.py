"""A trained model in use: partial orders of stages, decoding, the harness."""
