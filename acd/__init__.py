"""Training: Anchored Context Distillation of a student on recorded trajectories."""
