"""Compilation of plans to the program of each host, and the schedule of plans over iterations.

Entry points: `compiler` and `schedule`.
"""
