"""LLaMA cut into stages, what it computes and what room it takes."""
