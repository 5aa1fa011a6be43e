"""LLaMA cut into stages, what it computes and what room it takes.

Others use `llama` (stages and their shapes), `branch_scales` (numbers folded into their weights),
`document_mask` (what keeps packed documents apart), `flops`, `footprint`, which counts bytes by
formula and loads no JAX, `in_flight`, which says how many microbatches fit into a node's, and
`planned_case`, which fills both into a case.
"""
