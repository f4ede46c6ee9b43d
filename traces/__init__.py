"""This package holds what a model asked for: routing traces, how to capture, read and make them."""
