"""What the hosts of a run decide on together, whoever is lost.

`decisions` are rules without time or network, in the words of `generations`; `control` gives them
both, by `wire`. Others use `control.Control` and the words.
"""
