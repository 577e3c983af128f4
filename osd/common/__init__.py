"""Small things that every room needs: clocks, files, words, progress."""
