"""Results as sections of one page, of a terminal and of a notebook."""
