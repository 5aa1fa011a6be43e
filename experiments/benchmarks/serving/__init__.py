"""Services over several hosts: distant ones, and some that are lost."""
