"""Which nodes of a case train which experts, side by side, so that the last one is done soonest.

Others use `dividing.divide`, which tells of `lanes` as a `result.Division`, and `picture`.
"""
