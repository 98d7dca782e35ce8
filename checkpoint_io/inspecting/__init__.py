"""Looking at checkpoints and making others of them, in one process: what `booster ckpt` does."""
