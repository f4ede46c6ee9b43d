"""This package asks questions: run configs, sweeps, figures and the command line."""
