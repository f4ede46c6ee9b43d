"""This package holds the miss parts of a policy, one file each."""
