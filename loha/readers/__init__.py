"""Readers of recorded trajectories, one format a file."""
