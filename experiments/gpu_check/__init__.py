"""This package runs everything that needs a GPU, once, and writes a report: `scripts/gpu_check`."""
