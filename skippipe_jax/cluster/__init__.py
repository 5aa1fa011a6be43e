"""Membership of the hosts in a run, their messages, and their exit or continuation.

Entry points: `joining.connect`, `membership` and `agreement`.
"""
