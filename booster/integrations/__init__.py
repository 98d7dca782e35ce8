"""Loops of other libraries under a Booster; each module needs its library, an extra of the package."""
