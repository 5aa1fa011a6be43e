"""How parameters are updated.

Others use `adamw`, the update and its schedule, and `outer`, which averages what replicas have
changed behind the iterations.
"""
