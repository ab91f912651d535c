"""Bytes on the wire: by formula, by the interface of an emulated host, and simulated."""
