"""Membership of the hosts in a run, their messages, and their exit or continuation.

Other packages use `joining.connect`, `membership`, and the functions of `agreement`.
"""
