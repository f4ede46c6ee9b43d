"""This package holds the decisions: six seams, each a folder in which one file is one extension."""
