"""Control plane: one connection between every two hosts of a run.

Other packages use `mesh` (the connections of a host), `links` (messages), `keys` (authentication)
and `addresses`. For joiners and observers, `asking` is the client and `join_server` the server,
with the messages of `join_offer` and `status`. Only `jax_runtime` uses `jax._src`.
"""
