"""This package measures a machine by micro-benchmarks and writes a hardware profile of it."""
