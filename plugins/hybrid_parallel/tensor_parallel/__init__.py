"""Layers of which every rank holds a part."""
