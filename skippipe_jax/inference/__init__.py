"""A trained model in use, or several together: partial orders of stages, decoding, the harness.

Others use `run.Run`, `model_source.load_model` and `staged_model.StagedModel`, which the face
offers, and `ensemble.Ensemble`, which answers as one model does; commands use `evaluation`,
`domain_losses`, `remote_model`, `scaling`, `decoding` and `harness_model`.
"""
