"""Training checkpoints: models, optimizers, schedulers, dataloaders and RNG states in one directory."""
