"""Loading: from files of any writer to tensor slices in memory, with all checks before any change."""
