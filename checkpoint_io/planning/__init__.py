"""Save planning: pure functions over shapes and spans."""
