"""Tests on real vLLM, Ray and Redis servers."""

import os

# Ray reads these when it is first imported, which vLLM does: so they stand here, before everything
# else.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef0123456789abcdef")
