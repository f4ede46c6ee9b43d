"""This package holds the warmup parts of a policy, one file each."""
