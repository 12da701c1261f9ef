"""Model folders: makes them, checks them, and writes their files."""
