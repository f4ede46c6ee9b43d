"""This package holds the eviction parts of a policy, one file each."""
