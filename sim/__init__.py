"""This package decides which slice lives where, and keeps virtual time."""
