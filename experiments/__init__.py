"""Published figures, one a file, reproduced with `python -m experiments.NAME` from the repository's root."""
