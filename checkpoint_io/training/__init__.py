"""A whole training run: model, optimizer, schedulers, loaders and random states in one directory."""
