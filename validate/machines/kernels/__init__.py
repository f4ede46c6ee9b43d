"""This package computes experts from their bytes: one kernel per way of storing them in slices."""
