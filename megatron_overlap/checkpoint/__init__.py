"""Named slices stored layout-free and loaded at any layout."""
