"""The update rule."""
