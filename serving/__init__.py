"""Serving: the vLLM plugin, the launcher, the sweep."""
