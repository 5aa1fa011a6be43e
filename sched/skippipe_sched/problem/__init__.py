"""Planning problems and plans: cases, links, plans, and the rules for paths.

`open_case` reads cases that leave sizes or lengths open, `case` all others.
"""
