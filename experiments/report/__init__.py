"""This package writes one self-contained HTML file from a folder of results."""
