"""This package keeps virtual time: tiers, links and compute."""
