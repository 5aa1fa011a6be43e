"""How parameters are updated.

Others use `update_rule`, which is AdamW or Muon with their schedule, and `outer`, which averages
what replicas have changed behind the iterations.
"""
