"""Which nodes of a case train which experts, side by side, so that the last one is done soonest.

Others use `dividing.divide`, which makes a `lanes.Division` of lanes, and `picture`.
"""
