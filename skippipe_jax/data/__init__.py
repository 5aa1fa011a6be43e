"""Text to batches: documents, their tokens, rows of a sequence each, and microbatches by number.

Others use `batches`, which holds all of that together, `tokenizer`, `read_ahead`, and `tokenizing`
for text that is tokenized once.
"""
