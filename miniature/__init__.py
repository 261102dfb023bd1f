"""The miniature: a tiny agent and a tiny LCLM that make the whole story run on a laptop."""
