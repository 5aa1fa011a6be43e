"""Hugging Face's form of a model, in and out.

Others use `huggingface.open_weights`, whose stages are read one by one; the command, `conversion`.
"""
