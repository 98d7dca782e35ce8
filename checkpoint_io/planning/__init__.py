"""What is written where by whom: pure functions over shapes and spans."""
