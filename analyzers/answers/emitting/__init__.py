"""A plan as files that launchers and frameworks take."""
