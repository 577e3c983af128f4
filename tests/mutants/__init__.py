"""Small faults (cosmic-ray's mutants) put into the code, to see whether a test notices them.

    MODULES ──► all mutants ──► a draw, by file size ──► the tests that run there ──► survivors
                                (drawing.py)             (which_tests.py)

`make mutants` tries what is committed. A survivor shows a promise that no test checks, or a place
where the fault makes no difference. README.md beside this file lists them.
"""
