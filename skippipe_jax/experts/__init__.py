"""Experts: runs that branch from seed models, each on its own domain, and their mixture."""
