"""Text to batches: documents, their tokens, rows of a sequence each, and microbatches by number."""
