"""Execution of programs: jitted stage functions, state, dispatch, transfers, averaging.

Entry points: `runtime.open_runtime` and `Runtime.run`.
"""
