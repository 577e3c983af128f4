"""Targets and drafts as files: where they are, whether a pair fits, what a draft costs."""
