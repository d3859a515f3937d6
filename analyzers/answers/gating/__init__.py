"""Named figures of any artifact, rules about them, and a verdict that knows measurement noise."""
