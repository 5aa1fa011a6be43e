"""Processes of one machine: the hosts of a run, started, watched and started again."""
