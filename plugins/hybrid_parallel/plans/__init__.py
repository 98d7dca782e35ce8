"""Which layer is split how: data, from the user, the model, our tables or the module graph."""
