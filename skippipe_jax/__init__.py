"""Trains LLaMA models over partial, reordered pipeline paths, on one machine or on many hosts."""
