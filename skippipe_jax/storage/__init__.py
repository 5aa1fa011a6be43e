"""Files of a run: its folder, checkpoints, their remote copy, recordings.

Other packages use `run_dir`, `records` and `checkpoint`, which import no JAX; `checkpointer`,
`loading` and `restore`, which write and read checkpoints; `mirror`, `recording`, `files`,
`run_lock`; and `joined_folder` for the folder of a diskless host. Only `arrays` imports Orbax.
"""
