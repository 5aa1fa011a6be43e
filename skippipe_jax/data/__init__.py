"""Conversion of text to batches: documents, tokens, rows of one sequence each, and microbatches.

Other packages use `batches`, which combines all of that and reads ahead, `tokenizer`, and
`tokenizing` for text that is tokenized in advance.
"""
