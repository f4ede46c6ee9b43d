"""This module is moetier: which expert of a Mixture-of-Experts lives where, and when it moves."""

__version__ = "0.1.0"
