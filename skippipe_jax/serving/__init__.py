"""Serving of a trained model over HTTP with an OpenAI-compatible API.

Entry point: `server`.
"""
