"""LLaMA models partitioned into stages, with formulas for their operations and memory.

Other packages use `llama` (stages and their shapes), `branch_scales` (scales folded into weights),
`document_mask` (boundaries of packed documents), `flops` (operations), `footprint` (bytes by
formula, without JAX), `node_memory` (those on each device of a node), `in_flight` (microbatches
that fit) and `planned_case` (a case with these values). `sharding` declares how arrays are split
over the devices of a node.
"""
