"""This package does to real weights what a policy does to experts: quantise and slice them."""
