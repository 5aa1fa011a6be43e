"""Data pipeline: text to documents, tokens, sequences and numbered microbatches.

Entry points: `batches`, which combines all of these and reads ahead, and `tokenizer`.
"""
