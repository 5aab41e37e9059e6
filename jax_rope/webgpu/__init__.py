"""The GPU side: NumPy arrays in, NumPy arrays out. Nothing here knows of JAX."""
