"""The command line: one file per verb, and `main.py` that knows which file is which verb."""
