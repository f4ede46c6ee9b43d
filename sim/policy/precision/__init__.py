"""This package holds the precision parts of a policy, one file each."""
