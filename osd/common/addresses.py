"""Addresses as they stand in URLs."""

from __future__ import annotations


def join(host: str, port: int) -> str:
    """`join("::1", 8001) == "[::1]:8001"`, and `join("gpu-2", 8001) == "gpu-2:8001"`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
