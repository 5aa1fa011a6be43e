"""A trained model in use: partial orders of stages, scales, decoding, the harness.

Others use `run.Run` and `staged_model.StagedModel`, which the face offers; commands use
`evaluation`, `scaling`, `decoding` and `harness_model`.
"""
