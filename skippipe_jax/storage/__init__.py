"""Files of a run: its folder, checkpoints, their remote copy, recordings.

Entry points: `run_dir`, `records` and `checkpoint`, which import no JAX, `checkpointer` and
`loading`. Only `arrays` imports Orbax.
"""
