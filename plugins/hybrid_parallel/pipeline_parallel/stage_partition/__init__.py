"""Stage partition: the layers of each stage, and the forward that runs them."""
