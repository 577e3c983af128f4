"""`python -m osd`."""

from osd.cli import main

if __name__ == "__main__":
    main()
