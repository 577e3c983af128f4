"""Small faults put into the code on purpose (cosmic-ray's), to see whether a unit or contract test notices.

    MODULES ──► every mutant ──► drawn: places, spread by size ──► the tests that run there ──► survivors
                                 (drawing.py)                      (which_tests.py)

`make mutants` tries what is committed. A survivor is a promise that nothing holds the code to, or a place where the
fault makes no difference; each is read, and listed in README.md beside this file.
"""
