"""From files, whoever wrote them, to slices in memory; checked before anything changes."""
