"""Serving of a trained model over HTTP with an OpenAI-compatible API.

Commands use `server`.
"""
