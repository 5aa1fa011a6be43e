"""Campaigns of runs: a DAG of tasks, each of which runs once in child processes.

Other packages call `running.run_all` with their own tasks, which report whether they are done.
"""
