"""Which logical worker runs on which device (EasyScale)."""
