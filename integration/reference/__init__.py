"""References that share no code with eldr: what it claims is compared with them."""
