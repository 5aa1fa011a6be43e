"""Import and export of Hugging Face models.

Entry points: `huggingface.open_weights`, which reads one stage at a time, and `conversion`.
"""
