"""Plans as pictures and traces."""
