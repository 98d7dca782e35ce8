"""Expert parallelism: the experts of mixture-of-experts layers on different data-parallel ranks."""
