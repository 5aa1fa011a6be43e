"""Planning problems and plans: cases, links, plans, and the rules for paths.

`plan` is read by all other packages; `open_case` reads cases that leave sizes or lengths open,
`case` all others; `node_subset` removes nodes.
"""
