"""Token trees: a research engine beside the service, which verifies chains alone.

    drafts ─► trees (expand, merge) ─► one pass of the target (tree attention) ─► verify ─► tokens

It answers one question for a deployment: would trees pay, and up to which batch? Start with
`engine.py`. Nothing here is used by `osd serve`.
"""
