"""Runs that belong together: tasks with a DAG between them, in processes of their own, each once.

Others use `running.run_all` with tasks of their own, which say when they are done.
"""
