"""A trained model in use, or several: partial orders of stages, decoding, the harness.

Entry points: `run.Run`, `model_source.load_model`, `staged_model.StagedModel`, `ensemble.Ensemble`.
"""
