"""This package checks what the simulator says against real weights and real machines."""
