"""Tensor-parallel plans: from the user, the model, built-in tables or the module graph."""
