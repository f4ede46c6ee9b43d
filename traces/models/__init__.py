"""This package holds one YAML file per published model: its geometry, and nothing measured."""
