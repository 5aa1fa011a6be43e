"""LLaMA cut into stages, what it computes and what room it takes.

Others use `llama` (stages and their shapes), `branch_scales` (numbers folded into their weights),
`document_mask` (what keeps packed documents apart), `flops`, `footprint`, which counts bytes by
formula and loads no JAX, `node_memory`, which does so for each device of a node, `in_flight`, which
says how many microbatches fit there, and `planned_case`, which fills both into a case. `sharding`
declares how arrays are cut over the devices of a node.
"""
