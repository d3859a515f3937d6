"""A file per verb: the function that its command and its place in ``import ddltool`` are made from."""
