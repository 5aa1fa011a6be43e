"""Transfers and iterations between hosts: on shaped links, on loopback, and emulated."""
