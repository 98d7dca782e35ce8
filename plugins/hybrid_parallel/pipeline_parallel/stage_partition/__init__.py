"""Which part of a model a stage holds, and how the model's own forward runs it."""
