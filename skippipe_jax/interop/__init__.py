"""Hugging Face's form of a model, in and out."""
