"""Callbacks of a run: metrics, trackers, progress, pictures, and the user's own."""
