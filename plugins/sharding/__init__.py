"""What all strategies share that give each rank parts of parameters to update."""
