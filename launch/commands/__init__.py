"""Verbs that look into a run or stand beside one. The command line imports each only when it is asked for."""
