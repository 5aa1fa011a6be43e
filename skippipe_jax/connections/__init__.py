"""Control plane: one connection between every two hosts of a run.

Entry points: `mesh` (the connections of a host), `links` (messages) and `keys` (authentication);
for joiners and observers `asking` (client) and `join_server`. Only `jax_runtime` uses `jax._src`.
"""
