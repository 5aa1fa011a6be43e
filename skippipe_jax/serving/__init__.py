"""A trained model behind the API of OpenAI: requests over HTTP, answered by one engine.

Commands use `server`.
"""
