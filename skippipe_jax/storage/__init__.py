"""What a run leaves on disk: its folder, checkpoints, their copy elsewhere, recordings.

Others use `run_dir`, `records` and `checkpoint`, which load no JAX; `checkpointer`, `loading` and
`restore`, which write and read checkpoints; `mirror`, `recording`, `files`, `run_lock`; and
`joined_folder` for what a host keeps that has none of these. All of Orbax is in `arrays`.
"""
