"""Replanning: the search for a better plan while a run trains."""
