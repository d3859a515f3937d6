"""Pictures and one self-contained page."""
