"""LLaMA models partitioned into stages, with formulas for their operations and memory.

Entry points: `llama` (stages and their shapes), `flops` (operations), `footprint` (bytes by
formula) and `node_memory` (bytes on each device of a node).
"""
