"""`osd top`: the dashboard at a glance, in a terminal. Made of the control port's JSON views, and of nothing else.

reading ─► Answers ─► parts (lines of text), curve ─► layout (what there is room for) ─► run ─► terminal
"""
