"""Data pipeline: text to documents, tokens, rows of a sequence each, and numbered microbatches.

Other packages use `batches`, which combines all of these and reads ahead, `tokenizer`, `chat` for
conversations, and `tokenizing` for text that is tokenized once.
"""
