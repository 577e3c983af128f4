"""How fast a recorded run could have been: every fixed length, a simple rule, and who knows what
will be accepted.

    runs.py      what each proposer would have had at each output position
    replay.py    the same, of the draft model and the memory, asked again over served answers
    own.py       the bound of an evaluation, from its own runs: answers, and what its steps took
    costs.py     what a step takes
    rules.py     who proposes how much at each position, and what that takes; the oracles
    speeds.py    all rules over the same requests, and how much of a gap is closed
    foresight.py who knows the odds of a draft, and not what will be drawn

An oracle knows what will be accepted and is charged like everybody else, so nobody who decides
without knowing can be faster at the same costs.
"""
