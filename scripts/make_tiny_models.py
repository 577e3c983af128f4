#!/usr/bin/env python3
"""Builds the tiny models, unless they are in the cache, and prints where they lie."""

from osd.tiny.models import ensure

models = ensure()
print(f"target: {models.target}\ndraft:  {models.draft}")  # noqa: T201
