"""Campaigns of runs: a DAG of tasks, each of which runs once in child processes.

Entry point: `running.run_all`.
"""
