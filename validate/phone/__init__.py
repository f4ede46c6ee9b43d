"""This package checks the simulator against a phone's recorded runs, and fits a profile to some.

`python -m moetier.validate.phone fit DIR` and `python -m moetier.validate.phone predict DIR`.
"""
