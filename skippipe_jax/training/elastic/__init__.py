"""Training that goes on with the hosts that are left, and with those that join."""
