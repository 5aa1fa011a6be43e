"""Faults strike runs of real processes: what must hold, and what it costs."""
