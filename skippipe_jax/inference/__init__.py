"""A trained model in use: partial orders of stages, decoding, the harness.

Others use `run.Run` and `staged_model.StagedModel`, which the face offers; commands use
`evaluation`, `decoding` and `harness_model`.
"""
