"""Consensus of the hosts of a run on its members and its committed steps.

`decisions` is the protocol, a pure function over the types of `generations`; `control` drives it
over the network.
"""
