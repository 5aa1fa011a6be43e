"""Plans to programs: what each host does in an iteration, and which plan an iteration takes.

Others use `compiler`, `hops`, whose numbers name every transfer, and `schedule`. No JAX.
"""
