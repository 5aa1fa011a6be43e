"""Planning problems and plans: cases, links, plans, and the rules for paths.

`plan` is read by all other packages; `auto` reads cases that leave sizes or lengths open, `case`
all others; `fewer_nodes` removes nodes.
"""
