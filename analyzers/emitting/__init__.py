"""Enforcement settings written for launchers and frameworks."""
