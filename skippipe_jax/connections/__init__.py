"""How the hosts of a run reach each other: one connection between any two of them.

Others use `meeting`, `mesh`, `links` for what is said by a connection, `keys` and `secret` for whom
a host believes, `addresses`, and `severing`, which cuts connections; for those that would like to
join, `newcomer` asks and `reception` answers, by `invitation`, as it does by `status` for those
that only observe the run, for which `observer` asks. `jax_runtime` is all that touches `jax._src`.
"""
