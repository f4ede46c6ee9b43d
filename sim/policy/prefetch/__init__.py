"""This package holds the prefetch parts of a policy, one file each."""
