"""How the hosts of a run reach each other: one connection between any two of them.

Others use `mesh`, `links` for what is said by a connection, `keys` for whom a host believes,
`addresses`, and `severing`, which cuts connections; for those that would like to join, or only
observe the run, `asking` asks and `reception` answers, by `invitation` and `status`. `jax_runtime`
is all that touches `jax._src`.
"""
