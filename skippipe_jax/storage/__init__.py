"""What a run leaves on disk: its folder, checkpoints, their copy elsewhere, recordings.

Others use `run_folder` and `layout`, which load no JAX, `newest_whole`, `reader` and `writer` of
checkpoints, `mirror`, `recording`, `kept_tokenizer`, `parent` and `new_folder`, and `joined_folder`
for what a host keeps that has none of these. All of Orbax is in `array_files`.
"""
