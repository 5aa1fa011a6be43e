"""What is to be planned, and what a plan is: cases, links, plans, the rules that paths keep.

Everyone reads `plan`; `auto` reads cases that leave sizes or lengths open, `case` all others;
`fewer_nodes` takes nodes away.
"""
