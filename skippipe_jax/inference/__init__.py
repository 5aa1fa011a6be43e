"""A trained model in use, or several together: partial orders of stages, decoding, the harness.

Others use `run.Run` and `staged_model.StagedModel`, which the face offers, and
`ensemble.Ensemble`, which answers as one model does (`language_model`); commands use `evaluation`,
`ensemble_evaluation`, `ensemble_loading`, `remote_model`, `scaling`, `decoding` and
`harness_model`.
"""
