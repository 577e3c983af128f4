"""`osd top`: the dashboard at a glance, in a terminal. It reads the control port's JSON alone.

reading ─► Answers ─► parts (lines of text), curve ─► layout (what there is room for) ─► run ─►
terminal
"""
