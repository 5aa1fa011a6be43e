"""What a run leaves on disk: its folder, checkpoints, their copy elsewhere, recordings."""
