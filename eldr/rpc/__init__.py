"""Wire: the codec between messages and domain types, and what every channel and server has in common."""
