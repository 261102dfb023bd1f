"""Tolerances of the comparison tests, each with the noise that was observed when it was set."""
