"""This package is data: one YAML file per machine, every number with its unit and its source."""
