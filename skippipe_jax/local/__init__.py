"""Hosts of a run as processes of one machine: start, supervision and restart."""
