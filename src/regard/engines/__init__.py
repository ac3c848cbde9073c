"""Engines: each runs the normal form through the same four functions, `forward`, `backward`, `tile` and `reduce`."""
