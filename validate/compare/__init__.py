"""This package holds simulations against real runs of the same policies, and says how wrong."""
