"""This package performs plans on real hardware and writes the records a simulation writes."""
