"""How parameters are updated.

Others use `adamw`, the update and its schedule, and `local_updates`, which says what replicas
average when they average parameters.
"""
