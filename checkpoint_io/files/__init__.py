"""What is inside of the files: tensors, headers, manifests, JSON."""
