"""What a run is told, and what may change on resume."""
