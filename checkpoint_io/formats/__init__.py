"""File contents: tensors, headers, manifests, JSON."""
