"""The control of speculation: who proposes how many draft tokens at each step."""
