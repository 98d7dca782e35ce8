"""From slices in memory to bytes on the disk, on all ranks."""
