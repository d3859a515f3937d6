"""What is said of all this: checks, launch files, pages."""
