"""This package is what predictors need torch for: a model's parts, samples, training, checkpoints.

Importing it is light; its modules load torch.
"""
