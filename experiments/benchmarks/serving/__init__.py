"""Services over several hosts, distant or lost; and many requests at once of one model."""
