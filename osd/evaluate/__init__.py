"""`osd evaluate`: what each way to speculate gains on a target, at each length and load, measured
on real vLLM."""
