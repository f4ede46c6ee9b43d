"""This package performs plans with copies from pinned host memory to a GPU, and matmuls there."""
