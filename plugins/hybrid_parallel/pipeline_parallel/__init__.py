"""Pipeline parallelism: stages of a model that work on microbatches in turn."""
