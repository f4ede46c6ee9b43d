"""This package holds the routing parts of a policy, one file each."""
