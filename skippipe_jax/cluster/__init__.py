"""Who is here: the hosts of a run, what they tell each other, and how they end or go on.

Others use `joining.joined`, `team`, and the verbs of `agreement`. `attendance` and `place` belong
to the membership.
"""
